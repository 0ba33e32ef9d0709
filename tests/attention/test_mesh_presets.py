"""``attend`` of every preset's schemes over a mesh: by types, and by a partition, what one device computes."""

from functools import cache, partial

import decoders
import jax
import meshes
import pytest
from jax.sharding import PartitionSpec as P

import posjax as pj

ROWS, TOKENS, HEADS, KV_HEADS, SIZE, WIDTH = 4, 12, 4, 2, 8, 16


def schemes() -> dict:
    """Every scheme of a preset once, by the first preset that has it."""
    found = {}
    for name in decoders.NAMES:
        preset = decoders.preset(name)
        for scheme in preset.schemes if isinstance(preset, pj.Layers) else (preset,):
            found.setdefault(scheme, name)
    named = {}
    for scheme, name in found.items():
        named[f"{name} {sum(key.split()[0] == name for key in named) + 1}"] = scheme
    return named


SCHEMES = schemes()


@cache
def inputs(name) -> dict:
    scheme = SCHEMES[name]
    draw = iter(jax.random.split(jax.random.key(0), 16))
    sizes = {"q": (HEADS, scheme.query_size(SIZE)), "k": (KV_HEADS, scheme.key_size(SIZE)), "v": (KV_HEADS, SIZE)}
    made = {key: jax.random.normal(next(draw), (ROWS, TOKENS, *size)) for key, size in sizes.items()}
    params = scheme.init(next(draw), HEADS, SIZE, num_kv_heads=KV_HEADS, model_dim=WIDTH)
    params |= scheme.init_shared(next(draw), HEADS, SIZE)
    made["params"] = jax.tree.map(lambda a: a + 0.1 * jax.random.uniform(next(draw), a.shape), params)
    if scheme.reads_tokens:
        made["gates"] = scheme.prepare(made["params"], jax.random.normal(next(draw), (ROWS, TOKENS, WIDTH)))
    return jax.device_get(made)


def attend(name, x, **options):
    scheme, gates = SCHEMES[name], {"gates": (x["gates"], x["gates"])} if "gates" in x else {}
    if scheme.linear is None:
        options["return_residuals"] = True
    out = scheme.attend(x["q"], x["k"], x["v"], params=x["params"], **gates, **options)
    return out if isinstance(out, tuple) else (out, out[..., 0])


@cache
def alone(name):
    return jax.device_get(meshes.gradients(partial(attend, name))(inputs(name)))


def check(name, kind):
    where = meshes.mesh(kind)
    lies = {"params": P(), "gates": P("data", "tensor")}
    x = {
        key: jax.tree.map(lambda leaf, key=key: meshes.put(where, leaf, lies.get(key, meshes.SPEC)), value)
        for key, value in inputs(name).items()
    }
    found = meshes.gradients(partial(attend, name, **meshes.partition(kind)))(x)
    meshes.same(found, alone(name), tolerance=3e-5)


# One of each way in which a slot carries arrays, reads tokens, or differs between heads.
COVERING = (
    "rope 1",
    "xpos 1",
    "mixed 1",
    "pope 1",
    "t5 1",
    "kerple-log 1",
    "fire 1",
    "fox 1",
    "cope 1",
    "scale-invariant 1",
    "coca-tied 1",
    "rerope 1",
    "longformer 1",
    "learned-sinks 1",
    "ssmax 1",
    "log-n 1",
    "qwen3 1",
    "performer 1",
)


@pytest.mark.parametrize("name", COVERING)
def test_by_types(name):
    check(name, "explicit")


@pytest.mark.parametrize("name", ["coca-slack 1", "fox 1", "mixed 1", "performer 1"])
def test_by_a_partition(name):
    check(name, "auto")


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name, kind):
    check(name, kind)


@pytest.mark.parametrize("name", ["mixed 1", "pope 1"])
def test_features_of_key_heads_that_are_repeated(name):
    """Three key heads over two devices: every device takes the parameters of the heads that its own queries need."""
    scheme = SCHEMES[name]
    draw = iter(jax.random.split(jax.random.key(1), 4))
    made = {
        key: jax.random.normal(next(draw), (2, TOKENS, heads, SIZE)) for key, heads in (("q", 6), ("k", 3), ("v", 3))
    }
    made["params"] = scheme.init(next(draw), 6, SIZE, num_kv_heads=3)
    made = jax.device_get(made)
    run, spec = meshes.gradients(partial(attend, name)), P(None, None, "tensor")
    where = meshes.mesh("explicit")
    placed = {key: meshes.put(where, made[key], spec if key == "q" else P()) for key in "qkv"}
    placed["params"] = jax.tree.map(lambda leaf: meshes.put(where, leaf, P()), made["params"])
    meshes.same(run(placed), run(made), tolerance=3e-5)
