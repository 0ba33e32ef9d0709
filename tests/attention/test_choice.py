"""Which backend runs: asked for by name, or chosen when a program is lowered for its platform.

Programs are lowered for TPUs and NVIDIA GPUs on the CPU. The tests compare the kernels that their text names.
"""

import logging
import math
import re
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

from posjax.attention import attention
from posjax.bias import FIRE, ALiBi, CoPE, Kerple
from posjax.masks import Beyond, Causal, Dilated, Segments, Window
from posjax.positions import Range
from posjax.remap import Branch

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 8, 520, 4, 2, 16
FORWARD = "posjax_attention_forward"
GRADIENTS = {FORWARD, "posjax_attention_backward", "posjax_attention_correction"}
CUDNN, CUDNN_BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def inputs(batch=BATCH, tokens=TOKENS, dtype=jnp.float32) -> tuple:
    """Queries, keys and values of more than one tile."""
    rng = np.random.default_rng(0)
    heads = HEADS, KV_HEADS, KV_HEADS
    return tuple(rng.standard_normal((batch, tokens, n, SIZE), np.float32).astype(dtype) for n in heads)


def gradient(function):
    """The gradient of the sum of squares of an attention's output, for the first three arguments."""
    return jax.grad(lambda *x: jnp.square(function(*x).astype(jnp.float32)).sum(), argnums=(0, 1, 2))


def lowered(function, *arguments, platform="tpu") -> str:
    # A new function, so that no earlier trace is reused.
    program = jax.jit(lambda *x: function(*x)).trace(*arguments)
    return program.lower(lowering_platforms=(platform,)).as_text()


def traced(function, *arguments) -> None:
    """Traces a new function; nothing is compiled or run."""
    jax.eval_shape(lambda *x: function(*x), *arguments)


def kernels(function, *arguments, platform="tpu") -> set:
    """The kernels that a program holds when it is lowered for a platform."""
    return named(lowered(function, *arguments, platform=platform))


def named(text: str) -> set:
    found = re.findall(r'kernel_name = "(\w+)"|custom_call @(__cudnn[^(]*)', text)
    return {name for names in found for name in names if name}


causal = partial(attention, mask=Causal())


def test_lowered_for_a_tpu_it_is_the_kernel_and_elsewhere_it_is_not():
    assert kernels(causal, *inputs()) == {FORWARD}
    program = jax.jit(lambda *x: gradient(causal)(*x)).trace(*inputs())
    for platform, found in {"tpu": GRADIENTS, "cpu": set(), "cuda": set(), "rocm": set()}.items():
        assert named(program.lower(lowering_platforms=(platform,)).as_text()) == found


def test_the_cost_estimate_has_two_products_forward_and_five_backward():
    """Forward: one product over features and one over values. Backward: three and two. All over half of the pairs."""
    q, k = np.zeros((2, 1, 1024, 2, 64), np.float32)
    v = np.zeros((1, 1024, 2, 32), np.float32)
    found = re.findall(r"flops\\22:(\d+)", lowered(gradient(causal), q, k, v))
    pairs = 2 * 1024 * 1024 // 2
    assert list(map(int, found)) == [2 * pairs * (64 + 32), 2 * pairs * (3 * 64 + 2 * 32)]


@pytest.mark.parametrize(
    ("shape", "dense"),
    [
        ((1, 512, 512, 8), True),
        ((1, 513, 512, 1), False),
        ((8, 1, 2**15, 8), True),
        ((16, 1, 2**15, 8), False),
        ((64, 64, 64, 8), True),
    ],
)
def test_dense_is_the_default_while_all_logits_are_a_tile(shape, dense):
    """At most 2^21 logits over all rows and heads, and 512 x 512 per head; for more, a TPU runs its kernel."""
    rows, queries, keys, heads = shape
    q, k = (jax.ShapeDtypeStruct((rows, tokens, heads, SIZE), jnp.float32) for tokens in (queries, keys))
    assert kernels(attention, q, k, k) == (set() if dense else {FORWARD})


FAR = Branch(*(np.zeros((BATCH, TOKENS, heads, SIZE), np.float32) for heads in (HEADS, KV_HEADS)), Beyond(300))
IDS = np.zeros((BATCH, TOKENS), np.int32)


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": ALiBi(), "mask": Causal(), "sinks": np.zeros(HEADS, np.float32), "return_residuals": True},
        {"mask": Causal() & Segments(IDS), "scale": np.ones((TOKENS, 1), np.float32)},
        {"mask": Causal(), "remap": FAR},
    ],
    ids=["alibi, sinks and residuals", "segments and a scale of each query", "remap"],
)
def test_what_the_kernel_takes(settings):
    def run(*values):
        return jax.tree.leaves(attention(*values, **settings))[0]

    assert kernels(gradient(run), *inputs()) == GRADIENTS


def learned(spec):
    return spec.bind(spec.init(jax.random.key(1), HEADS), num_heads=HEADS)


NOT_FOR_TPU = {
    "xpos": lambda: {"decay": np.ones(SIZE) / 500},
    "fire": lambda: {"bias": learned(FIRE())},
    "cope": lambda: {"bias": CoPE(16).bind({"table": jnp.zeros((16, SIZE))}, num_heads=HEADS)},
    "weighted kerple": lambda: {"bias": learned(Kerple(kind="weighted-power"))},
    "dilated heads": lambda: {"mask": Causal() & Dilated(300, (1, 2, 1, 2))},
    "a window as an array": lambda: {"mask": Causal() & Window(jnp.int32(3))},
    "an array": lambda: {"mask": Causal() & np.tri(TOKENS, dtype=bool)},
}


@pytest.mark.parametrize("name", NOT_FOR_TPU)
def test_what_the_kernel_does_not_take(name):
    settings = {"mask": Causal()} | NOT_FOR_TPU[name]()
    assert kernels(partial(attention, **settings), *inputs()) == set()
    refused("implementation", lambda: traced(partial(attention, **settings, implementation="tpu"), *inputs()))


def test_integers_of_64_bits_are_left_to_blockwise():
    with jax.enable_x64(True):
        assert kernels(gradient(causal), *inputs()) == set()
        refused("jax_enable_x64", lambda: traced(partial(causal, implementation="tpu"), *inputs()))


def test_the_kernel_computes_what_dense_does():
    """The kernel works in base 2; its results are converted back."""
    q, k, v = inputs(1, 200, jnp.bfloat16)
    scale = np.linspace(0.1, 0.4, 200, dtype=np.float32)[:, None]
    settings = {"mask": Causal(), "scale": scale, "remap": Branch(q[:, ::-1], k, Beyond(90)), "return_residuals": True}
    settings["sinks"] = np.linspace(-1, 1, HEADS, dtype=np.float32)
    with pltpu.force_tpu_interpret_mode():
        # The interpreter calls jax itself, so nothing else may run meanwhile.
        got = jax.block_until_ready(jax.jit(partial(attention, **settings, implementation="tpu"))(q, k, v))
    q, k, v, remap = jax.tree.map(lambda x: x.astype(np.float32), (q, k, v, settings["remap"]))
    want = jax.jit(partial(attention, **settings | {"remap": remap}, implementation="dense"))(q, k, v)
    chex.assert_trees_all_close(got[1], want[1], atol=0.02)
    chex.assert_trees_all_close(np.asarray(got[0], np.float32), want[0], atol=0.03)


# Transformations.


def test_the_kernel_in_scans_and_checkpoints():
    def scanned(q, k, v):
        return jax.lax.scan(lambda q, _: (causal(q, k, v), None), q, None, length=3)[0]

    assert kernels(gradient(scanned), *inputs()) == GRADIENTS
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    assert kernels(gradient(jax.checkpoint(causal, policy=kept)), *inputs()) == GRADIENTS


def mesh(*shape, names=("data",)) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape) if shape else None]).reshape(shape or (-1,))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def test_inside_shard_map_it_is_the_kernel():
    rows = P("data")
    split = jax.shard_map(causal, mesh=mesh(), in_specs=rows, out_specs=rows)
    assert kernels(gradient(split), *inputs()) == GRADIENTS


def test_a_mesh_that_the_compiler_divides_is_left_to_blockwise():
    devices, rows = mesh(4, 2, names=("data", "model")), P("data")
    values = jax.device_put(inputs(), NamedSharding(devices, rows))
    assert kernels(causal, *values) == set()
    refused("placement", lambda: jax.jit(partial(causal, implementation="tpu")).trace(*values))
    over_one_axis = partial(jax.shard_map, mesh=devices, in_specs=rows, out_specs=rows, axis_names={"data"})
    assert kernels(over_one_axis(causal), *values) == set()


def test_a_mesh_that_types_or_a_partition_divide_runs_the_kernel():
    rows = P("data", None, "model")
    typed = jax.device_put(inputs(), NamedSharding(jax.make_mesh((4, 2), ("data", "model")), rows))
    assert kernels(gradient(causal), *typed) == GRADIENTS
    partitioned = jax.device_put(inputs(), NamedSharding(mesh(4, 2, names=("data", "model")), rows))
    assert kernels(gradient(partial(causal, placement=rows, implementation="tpu")), *partitioned) == GRADIENTS


def test_a_warning_says_that_a_partition_is_missing_for_the_kernel():
    """On a mesh of TPUs, and only where a partition would help."""
    chips = AbstractMesh(
        (8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("TPU v5e", None, "tpu")
    )
    sharding = NamedSharding(chips, P("data"))
    values = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs()]
    with pytest.warns(UserWarning, match="placement="):
        jax.jit(lambda *x: causal(*x)).trace(*values)
    jax.jit(lambda *x: causal(*x, placement=P("data"))).trace(*values)
    jax.jit(lambda *x: causal(*x, bias=learned(FIRE()))).trace(*values)


# NVIDIA GPUs. None is needed: what JAX says of the host is replaced, and programs are lowered, not run.

HALF = partial(inputs, dtype=jnp.bfloat16)


def sized(size: int, value_size: int | None = None) -> tuple:
    """Queries, keys and values in half precision, whose heads have these sizes."""
    shapes = ((1, TOKENS, HEADS, n) for n in (size, size, value_size or size))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def use_cudnn(monkeypatch) -> None:
    """A library of cuDNN is installed."""
    set_library(monkeypatch, SimpleNamespace(cudnn_get_version=lambda: 91002))


def set_library(monkeypatch, library) -> None:
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", library)


def use_gpu(monkeypatch, capability: str) -> None:
    """The host has a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])


@pytest.fixture
def gpu(monkeypatch):
    use_cudnn(monkeypatch)
    use_gpu(monkeypatch, "8.0")
    yield
    jax.clear_caches()


SLOW_HERE = pytest.mark.filterwarnings("ignore:attention runs in loops")
"""What a GPU without a kernel says: see test_gpu.py."""


@SLOW_HERE
def test_without_a_suitable_gpu_a_program_for_one_is_blockwise(monkeypatch):
    """But cuDNN is there for who asks for it, if it is installed."""
    ask = partial(causal, implementation="cudnn")
    set_library(monkeypatch, None)
    refused("implementation", lambda: traced(ask, *HALF()))
    use_cudnn(monkeypatch)
    assert kernels(ask, *HALF(), platform="cuda") == {CUDNN}
    assert kernels(causal, *HALF(), platform="cuda") == set()
    use_gpu(monkeypatch, "7.5")
    assert kernels(causal, *HALF(), platform="cuda") == set()
    jax.clear_caches()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("mask", "kind", "window", "implementation"),
    [
        (None, "NO_MASK", 0, None),
        (Causal() & Window(100), "CAUSAL", 100, None),
        (Causal(), "CAUSAL", 0, "cudnn"),
    ],
)
def test_lowered_for_a_gpu_it_is_cudnn(mask, kind, window, implementation):
    attend = partial(attention, mask=mask, implementation=implementation)
    text = lowered(gradient(attend), *HALF(), platform="cuda")
    assert named(text) == {CUDNN, CUDNN_BACKWARD}
    assert set(re.findall(r"mask_type[^A-Z]+([A-Z_]+)", text)) == {kind}
    assert set(re.findall(r"sliding_window_length\\22: (\d+)", text)) == {str(window)}
    assert set(re.findall(r"fmha_scale\\22: ([\d.]+)", text)) == {"1.0"}


@pytest.mark.usefixtures("gpu")
def test_a_gpu_on_the_host_changes_nothing_for_other_platforms():
    program = jax.jit(lambda *x: causal(*x)).trace(*sized(128))
    found = {name: named(program.lower(lowering_platforms=(name,)).as_text()) for name in ("cuda", "tpu", "cpu")}
    assert found == {"cuda": {CUDNN}, "tpu": {FORWARD}, "cpu": set()}


def alibi(*values, **options):
    return attention(*values, **{"bias": ALiBi(), "mask": Causal()} | options)


def fused(text: str) -> list[str]:
    """The types of the arguments of cuDNN's forward passes in a program."""
    return re.findall(r"@__cudnn\$fmhaSoftmax\(.*: \((.*)\) ->", text)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_fixed_alibi_is_cudnn_with_more_features(implementation):
    text = lowered(gradient(partial(alibi, implementation=implementation)), *HALF(), platform="cuda")
    assert named(text) == {CUDNN, CUDNN_BACKWARD}
    assert set(re.findall(r"fmha_scale\\22: ([\d.]+)", text)) == {"1.0"}
    (types,) = fused(text)
    assert set(re.findall(r"x(\d+)xbf16", types)) == {str(SIZE + 8)}


@pytest.mark.usefixtures("gpu")
def test_fixed_alibi_is_cudnn_where_rows_are_split_and_in_a_checkpointed_scan():
    rows = P("data")
    split = jax.shard_map(alibi, in_specs=rows, out_specs=rows, mesh=mesh())
    placed = partial(alibi, placement=NamedSharding(mesh(), rows))
    for function in (split, placed):
        assert kernels(gradient(function), *HALF(), platform="cuda") == {CUDNN, CUDNN_BACKWARD}

    def scanned(q, k, v):
        return jax.lax.scan(jax.checkpoint(lambda q, _: (alibi(q, k, v), None)), q, None, length=3)[0]

    assert kernels(gradient(scanned), *HALF(), platform="cuda") == {CUDNN, CUDNN_BACKWARD}


@SLOW_HERE
@pytest.mark.usefixtures("gpu")
def test_learned_alibi_is_not_cudnn():
    def run(slopes, *values):
        return alibi(*values, bias=ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS))

    assert kernels(run, jnp.ones(HEADS), *HALF(), platform="cuda") == set()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need a newer jax")
@pytest.mark.usefixtures("gpu")
def test_where_our_own_kernel_runs_it_computes_alibi_and_cudnn_what_has_no_bias(monkeypatch):
    use_gpu(monkeypatch, "9.0")
    texts = [lowered(function, *HALF(), platform="cuda") for function in (alibi, causal)]
    assert ["mosaic_gpu" in text for text in texts] == [True, False]
    assert [named(text) & {CUDNN} for text in texts] == [set(), {CUDNN}]


NOT_FOR_CUDNN = {
    "residuals": ({"return_residuals": True}, HALF),
    "sinks": ({"sinks": np.zeros(HEADS, np.float32)}, HALF),
    "bias": ({"bias": ALiBi(symmetric=True)}, HALF),
    "soft cap": ({"softcap": 30.0}, HALF),
    "remap": ({"remap": FAR}, HALF),
    "decay": ({"decay": np.ones(SIZE)}, HALF),
    "float32": ({}, inputs),
    "window": ({"mask": Window(9)}, HALF),
    "segments": ({"mask": Causal() & Segments(IDS)}, HALF),
    "later": ({"mask": Causal(), "q_positions": Range(1, TOKENS)}, HALF),
    "array": ({"mask": Causal(), "q_positions": np.arange(TOKENS)}, HALF),
    "two sizes": ({}, partial(sized, 16, 8)),
    "a size of 12": ({}, partial(sized, 12)),
    "a size of 136": ({}, partial(sized, 136)),
}


@SLOW_HERE
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", NOT_FOR_CUDNN)
def test_what_cudnn_does_not_take(name):
    settings, arguments = NOT_FOR_CUDNN[name]
    refused("implementation", lambda: traced(partial(attention, **settings, implementation="cudnn"), *arguments()))
    if name in ("residuals", "bias", "segments", "two sizes"):
        assert kernels(partial(attention, **settings), *arguments(), platform="cuda") == set()


@SLOW_HERE
@pytest.mark.usefixtures("gpu")
def test_the_choice_and_its_reason_are_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="posjax"):
        traced(partial(causal, bias=ALiBi(symmetric=True)), *HALF())
    tpu, cuda, cudnn = (record.message for record in caplog.records if record.name == "posjax")
    assert "tpu" in tpu
    assert "cuda" in cuda
    assert all(word in cudnn for word in ("cuda", "cuDNN", "LinearBias"))
