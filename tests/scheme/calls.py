"""Small projections, and calls of a scheme on them: in one pass, and with a cache."""

import jax.numpy as jnp
import numpy as np

BATCH, TOKENS, HEADS, KV, SIZE = 2, 11, 4, 2, 8


def draw(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def as_float32(*arrays):
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def projections(query_size=SIZE, key_size=SIZE):
    sizes = ((HEADS, query_size), (KV, key_size), (KV, SIZE))
    return tuple(draw((BATCH, TOKENS, *size), seed) for seed, size in enumerate(sizes))


def decoded(scheme, **options):
    index = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
    cache = scheme.init_cache(BATCH, TOKENS, num_heads=HEADS, num_kv_heads=KV, head_dim=SIZE, chunk=TOKENS)
    given = {"index": index, "length": TOKENS} | options
    return scheme.decode(*as_float32(*projections()), cache, **given)


def attended(scheme, **options):
    return scheme.attend(*as_float32(*projections()), **options)
