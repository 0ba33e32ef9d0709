"""Small decoders for the tests (two layers of width 32): configs, parameters and documents; each is compiled once."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posjax as pj
from posjax.nn import Decoder, DecoderConfig
from posjax.positions import from_segments

VOCAB, LENGTH = 24, 16
NAMES = pj.scheme_names()
# Small enough that rows of LENGTH tokens exceed most windows, chunks and training lengths.
OPTIONS = {
    "learned": {"max_length": LENGTH},
    "hierarchical": {"max_length": 6},
    "mrope": {"sections": (2, 1, 1)},
    "pope": {"init_delta": "uniform"},
    "coca-planes": {"planes": (1, 3)},
    "t5": {"num_buckets": 8, "max_distance": 12},
    "fire": {"threshold": 6.0},
    "cope": {"max_position": 6},
    "path": {"rank": 4},
    "relative": {"extent": 5, "size": 4, "clip": 1.5},
    "shaw": {"extent": 5},
    "scale-invariant": {"tau": 2.0},
    "fope": {"original_length": 8, "learned": True},
    "hope": {"original_length": 8},
    "clex": {"original_length": 8, "max_factor": 4, "steps": 5},
    "rerope": {"window": 4},
    "leaky-rerope": {"window": 4, "factor": 2.0},
    "inverse-leaky": {"length": 16, "extension": 2.0},
    "self-extend": {"group": 2, "window": 4},
    "lm-infinite": {"n_local": 6, "n_global": 2},
    "streaming": {"first": 2, "recent": 5},
    "dual-chunk": {"length": 8},
    "string": {"length": 12, "window": 2},
    "window": {"size": 5},
    "chunked": {"size": 6},
    "longformer": {"window": 8, "dilation": (1, 1, 2, 2)},
    "log-n": {"length": 8, "minimum": 1},
    "cosine": {"length": 8},
    "drope": {"extension": 2.0},
    "learned-cosine": {"length": 8},
    "randomised": {"max_length": 64},
    "pose": {"max_length": 32},
    "hwfa": {"num_layers": 3, "length": 16},
    "hwfa2": {"num_layers": 3, "length": 8, "full_layers": 1},
    "gemma3": {"num_layers": 6, "window": 4},
    "llama4": {"num_layers": 4, "chunk": 6, "floor_scale": 8},
    "smollm3": {"num_layers": 4},
    "gpt-oss": {"num_layers": 2, "window": 4, "original_length": 8},
    "rnope-swa": {"num_layers": 4, "window": 4},
    "qwen3-next": {"num_layers": 4, "num_heads": 4, "key_dim": 8, "value_dim": 6, "num_key_heads": 2},
    "gated-delta": {"num_heads": 4, "key_dim": 8, "num_key_heads": 2},
    "performer": {"num_features": 16},
    "linear-taylor": {"order": 2},
    "linear-limit": {"order": 2},
}
# A separate decoder for each preset would cost a second of compilation each. By default, presets share decoders: every
# layer of a group has a different preset, and an error in one layer makes the results of the whole decoder wrong. The
# wide grid has a decoder for each preset.
GROUPS = {
    "rotations": "xpos vo-rope mixed clex pope coca-planes",
    "biases": "alibi t5 kerple-power fox cope",
    "raw and half-width keys": "coca-strict coca-tied rerope",
    "logits": "learned-sinks ssmax key-norm learned-cosine",
    "linear": "linear-elu linear-taylor gated-delta",
    "not shift-invariant": "coca-slack fire chunked longformer self-extend lm-infinite streaming dual-chunk performer",
}
# Presets that a group cannot have: position embeddings and layer patterns. RoPE is here to test a scan over layers. All
# others run in the wide grid only: each has the arrays and slots of another preset, but a different rule, mask, feature
# map or order of the layers.
ALONE = ("rope", "sinusoidal", "learned", "hierarchical", "hwfa", "llama4")


def preset(name):
    return pj.scheme(name, **OPTIONS.get(name, {}))


def attending(name):
    """The schemes of a preset that compute attention, each once: all but layers of Gated DeltaNet."""
    found = preset(name)
    return [scheme for scheme in dict.fromkeys(getattr(found, "schemes", (found,))) if not scheme.is_delta]


def scheme_of(name):
    """A preset; for a group, layers that have each scheme of its presets once.

    A group's schemes have no ``training_positions``: all layers must agree on them, and decoders do not read them.
    """
    if name not in GROUPS:
        return preset(name)
    members = [preset(member) for member in GROUPS[name].split()]
    schemes = [scheme for each in members for scheme in getattr(each, "schemes", (each,))]
    return pj.Layers(
        ((tuple(dict.fromkeys(dataclasses.replace(scheme, training_positions=None) for scheme in schemes)), 1),)
    )


def config_of(name):
    """The decoder config of a preset or of a group. The layers of a group all differ, so they need no scan."""
    return config(scheme_of(name), scan_layers=name not in GROUPS)


def config(scheme, **options):
    layers = len(scheme.schemes) if isinstance(scheme, pj.Layers) else 2
    sizes = {"vocab_size": VOCAB, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 24}
    return DecoderConfig(**(sizes | {"num_layers": layers} | options), scheme=scheme)


@functools.cache
def made(settings):
    """Graph and parameters of a decoder. Parameters of the same shapes have the same values in every decoder."""
    return nnx.split(Decoder(settings, rngs=nnx.Rngs(1)))


@functools.cache
def compiled(graph):
    """``run(parameters, tokens, positions, segments, length)`` -> ((loss, logits), gradients), compiled once."""

    def loss(state, tokens, positions, segments, length):
        logits = nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments, length=length)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens * 7 % VOCAB)[..., None], axis=-1)[..., 0]
        valid = segments >= 0
        return -jnp.sum(jnp.where(valid, chosen, 0.0)) / valid.sum(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(settings, rows, length=LENGTH):
    graph, state = made(settings)
    (_, logits), gradients = compiled(graph)(state, *rows, length)
    return np.asarray(logits), nnx.to_pure_dict(gradients)


def documents():
    tokens = np.random.default_rng(0).integers(0, VOCAB, 32)
    return tokens[:10], tokens[10:16], tokens[16:]


def layout(*rows, left=False):
    """Tokens, positions and segment ids of rows of documents. The padding is random tokens, which must be ignored."""
    tokens = np.random.default_rng(len(rows) + left).integers(0, VOCAB, (len(rows), LENGTH))
    segments = np.full((len(rows), LENGTH), -1)
    for index, row in enumerate(rows):
        at = LENGTH - sum(map(len, row)) if left else 0
        for number, document in enumerate(row):
            tokens[index, at : at + len(document)] = document
            segments[index, at : at + len(document)] = number
            at += len(document)
    tokens, segments = jnp.asarray(tokens, jnp.int32), jnp.asarray(segments, jnp.int32)
    return tokens, from_segments(segments), segments


def separate():
    a, b, c = documents()
    return layout([a], [b], [c])


def assert_same(found, wanted, tolerance=2e-5):
    chex.assert_trees_all_close(found, wanted, atol=tolerance, rtol=tolerance)


def logits_of(model, tokens, **options):
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s: nnx.merge(graph, s)(tokens, **options))(state))
