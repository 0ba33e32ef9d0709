"""``attend`` of every preset's schemes over a mesh, split by types or by a partition, against one device."""

from functools import cache, partial

import decoders
import jax
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import posjax as pj

ROWS, TOKENS, HEADS, KV_HEADS, SIZE, WIDTH = 4, 12, 4, 2, 8, 16


def schemes() -> dict:
    """Every scheme of the presets once, under the name of the first preset that has it."""
    found = {}
    for name in decoders.NAMES:
        for scheme in decoders.attending(name):
            found.setdefault(scheme, name)
    named = {}
    for scheme, name in found.items():
        named[f"{name} {sum(key.split()[0] == name for key in named) + 1}"] = scheme
    return named


SCHEMES = schemes() | {"retention 1": pj.scheme("linear-elu", decay=True)}


@cache
def inputs(name) -> dict:
    scheme, draw = SCHEMES[name], np.random.default_rng(0)
    sizes = {"q": (HEADS, scheme.query_size(SIZE)), "k": (KV_HEADS, scheme.key_size(SIZE)), "v": (KV_HEADS, SIZE)}
    made = {key: normal(draw, ROWS, TOKENS, *size) for key, size in sizes.items()}
    made["params"] = parameters(scheme, draw)
    if scheme.reads_tokens:
        made["gates"] = jax.jit(scheme.prepare)(made["params"], normal(draw, ROWS, TOKENS, WIDTH))
    return jax.device_get(made)


def normal(draw, *shape):
    return draw.normal(size=shape).astype(np.float32)


def parameters(scheme, draw):
    """Not the initial values, which are often equal for all heads."""

    @jax.jit
    def initial(key):
        own = scheme.init(key, HEADS, SIZE, num_kv_heads=KV_HEADS, model_dim=WIDTH)
        return own | scheme.init_shared(jax.random.fold_in(key, 1), HEADS, SIZE)

    return jax.tree.map(
        lambda a: a + 0.1 * draw.random(a.shape, np.float32), jax.device_get(initial(jax.random.key(0)))
    )


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
    mesh = meshes.mesh(kind)
    specs = {"params": P(), "gates": P("data", "tensor")}
    x = {
        key: jax.tree.map(lambda leaf, key=key: meshes.put(mesh, leaf, specs.get(key, meshes.SPEC)), value)
        for key, value in inputs(name).items()
    }
    found = meshes.gradients(partial(attend, name, **meshes.partition(kind)))(x)
    meshes.same(found, alone(name), tolerance=3e-5)


# An example for each way in which a slot holds arrays or differs between heads; ``fox`` and ``mixed`` are below.
COVERING = "cope coca-tied rerope retention"


@pytest.mark.parametrize("name", COVERING.split())
def test_by_types(name):
    check(f"{name} 1", "explicit")


def test_by_a_partition():
    check("fox 1", "auto")


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name, kind):
    check(name, kind)


@pytest.mark.parametrize("name", ["mixed 1", pytest.param("pope 1", marks=pytest.mark.wide)])
def test_features_of_key_heads_that_are_repeated(name):
    """Three key heads over two devices: every device takes the parameters of the heads that its own queries need."""
    scheme, draw = SCHEMES[name], np.random.default_rng(1)
    made = {key: normal(draw, 2, TOKENS, heads, SIZE) for key, heads in (("q", 6), ("k", 3), ("v", 3))}
    made["params"] = jax.device_get(jax.jit(lambda key: scheme.init(key, 6, SIZE, num_kv_heads=3))(jax.random.key(1)))
    run, spec = meshes.gradients(partial(attend, name)), P(None, None, "tensor")
    mesh = meshes.mesh("explicit")
    placed = {key: meshes.put(mesh, made[key], spec if key == "q" else P()) for key in "qkv"}
    placed["params"] = jax.tree.map(lambda leaf: meshes.put(mesh, leaf, P()), made["params"])
    meshes.same(run(placed), run(made), tolerance=3e-5)
