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
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax.attention import api, attention, cudnn
from posjax.attention.backends import Backend
from posjax.attention.rows import Rows
from posjax.attention.sharded import Placement
from posjax.attention.tpu import entry
from posjax.bias import FIRE, T5, ALiBi, CoPE, Kerple, Sandwich
from posjax.masks import Beyond, Causal, Dilated, FirstTokens, Segments, Window
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


def test_if_asked_for_the_kernel_runs_even_for_a_few_tokens():
    few = inputs(tokens=20)
    assert kernels(causal, *few) == set()
    assert kernels(partial(causal, implementation="tpu"), *few) == {FORWARD}


@pytest.mark.parametrize(
    ("shape", "dense"),
    [((1, 512, 512, 8), True), ((2, 512, 512, 8), False), ((1, 513, 512, 1), False), ((8, 1, 2**15, 8), True),
     ((16, 1, 2**15, 8), False), ((64, 64, 64, 8), True)],
)  # fmt: skip
def test_dense_is_the_default_while_all_logits_are_a_tile(monkeypatch, shape, dense):
    """At most 2^21 logits over all rows and heads, and 512 x 512 per head."""
    taken = []
    monkeypatch.setitem(api.BACKENDS, "dense", Backend(lambda x: taken.append(x) or Rows(x.q), None))
    rows, queries, keys, heads = shape
    q, k = (jax.ShapeDtypeStruct((rows, tokens, heads, 4), jnp.float32) for tokens in (queries, keys))
    traced(attention, q, k, k)
    assert bool(taken) == dense


def test_above_one_tile_the_default_takes_the_memory_of_blockwise():
    """Temporary memory of the gradients of 64 rows of 4 heads; ``dense`` takes more than twice as much."""
    x = [jax.ShapeDtypeStruct((64, 256, 4, 16), jnp.float32)] * 3
    found = [
        jax.jit(gradient(partial(causal, implementation=name))).lower(*x).compile().memory_analysis().temp_size_in_bytes
        for name in (None, "blockwise", "dense")
    ]
    assert found[0] <= 1.3 * found[1] < found[2] / 2


def test_on_a_cpu_the_default_is_blockwise_to_the_bit():
    settings = {"mask": Causal() & (Window(300) | FirstTokens(4)), "bias": ALiBi(), "sinks": jnp.ones(HEADS)}

    @partial(jax.jit, static_argnums=0)
    @partial(jax.grad, argnums=(1, 2, 3), has_aux=True)
    def results(implementation, *values):
        out, lse = attention(*values, **settings, return_residuals=True, implementation=implementation)
        return (jnp.square(out) + lse[..., None]).sum(), (out, lse)

    values = inputs(1)
    chex.assert_trees_all_equal(results(None, *values), results("blockwise", *values))


FAR = Branch(*(np.zeros((BATCH, TOKENS, heads, SIZE), np.float32) for heads in (HEADS, KV_HEADS)), Beyond(300))
IDS = np.zeros((BATCH, TOKENS), np.int32)


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": ALiBi(), "mask": Causal(), "sinks": np.zeros(HEADS, np.float32), "return_residuals": True},
        pytest.param({"bias": Sandwich(), "return_residuals": True}, marks=pytest.mark.wide),
        {"mask": Causal() & Segments(IDS), "scale": np.ones((TOKENS, 1), np.float32)},
        {"mask": Causal(), "remap": FAR},
    ],
    ids=["alibi, sinks and residuals", "sandwich and residuals", "segments and a scale of each query", "remap"],
)
def test_what_the_kernel_takes(settings):
    def run(*values):
        return jax.tree.leaves(attention(*values, **settings))[0]

    assert kernels(gradient(run), *inputs()) == GRADIENTS


def refused(name: str) -> tuple:
    """Settings that the kernel does not support, and the reason."""
    key = jax.random.key(1)

    def bias(spec):
        return spec.bind(spec.init(key, HEADS), num_heads=HEADS)

    cope = CoPE(16).bind({"table": jnp.zeros((16, SIZE))}, num_heads=HEADS)
    return {
        "xpos": ({"decay": np.ones(SIZE) / 500}, "xPos decays every feature"),
        "fire": ({"bias": bias(FIRE())}, "InterpolatedBias is neither a number for each key"),
        "cope": ({"bias": cope}, "ContextualBias is neither a number for each key"),
        "weighted kerple": (
            {"bias": bias(Kerple(kind="weighted-power"))},
            "WeightedPowerBias is neither a number for each key",
        ),
        "dilated heads": ({"mask": Causal() & Dilated(300, (1, 2, 1, 2))}, "mask differs between heads"),
    }[name]


@pytest.mark.parametrize("name", ["xpos", "fire", "cope", "weighted kerple", "dilated heads"])
def test_what_the_kernel_does_not_take(name):
    settings, reason = refused(name)
    settings = {"mask": Causal()} | settings
    assert kernels(partial(attention, **settings), *inputs()) == set()
    with pytest.raises(ValueError, match=f"implementation='tpu': .*{reason}"):
        traced(partial(attention, **settings, implementation="tpu"), *inputs())


def test_without_a_tpu_a_plain_call_says_so():
    with pytest.raises(ValueError, match="implementation='tpu': found no TPU; use 'blockwise', or None"):
        attention(*inputs(1), implementation="tpu")
    with pytest.raises(ValueError, match="interpret mode"):
        jax.jit(partial(attention, implementation="tpu"))(*inputs(1))


def test_integers_of_64_bits_are_left_to_blockwise():
    with jax.enable_x64(True):
        assert kernels(gradient(causal), *inputs()) == set()
        with pytest.raises(ValueError, match="jax_enable_x64"):
            traced(partial(causal, implementation="tpu"), *inputs())


def test_a_misspelt_backend():
    with pytest.raises(ValueError, match="did you mean 'cudnn'"):
        traced(partial(attention, implementation="cudn"), *inputs())


@pytest.mark.parametrize(
    ("pick", "scale"), [(lambda x: x.q, 0.1), (lambda x: x.remap[0].q, 0.2)], ids=["near", "remap"]
)
def test_queries_are_rounded_once_for_the_kernel(monkeypatch, pick, scale):
    """With a number as scale, ``q scale log2 e`` has a relative error of at most 2^-8; also for remapped queries."""
    factors = []

    def attend(x, options):
        factors.append(options.factor)
        return Rows(pick(x), *[pick(x)[..., 0].astype(jnp.float32)] * 3)

    monkeypatch.setattr(entry, "attend", attend)
    q, k, v = inputs(1, 20, jnp.bfloat16)
    run = partial(attention, q, k, v, remap=Branch(q, k, Beyond(9)), implementation="tpu")
    found = run(scale=np.full((20, 1), scale, np.float32))
    assert set(factors) == {1.0}
    factors.clear()
    chex.assert_trees_all_equal(np.asarray(run(scale=scale)), np.asarray(q))
    np.testing.assert_allclose(factors, scale / np.log(2))
    assert found.dtype == jnp.bfloat16
    chex.assert_trees_all_close(np.asarray(found, float), np.asarray(q, float) * scale / np.log(2), rtol=2**-8)


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


def scanned(*values):
    q, k, v = values
    return jax.lax.scan(lambda q, _: (causal(q, k, v), None), q, None, length=3)[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(jax.checkpoint(causal), marks=pytest.mark.wide),
        scanned,
        jax.checkpoint(causal, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    ],
    ids=["remat", "scan", "remat but for products"],
)
def test_the_kernel_under_transformations(function):
    assert kernels(gradient(function), *inputs()) == GRADIENTS


def test_on_several_cpus_by_pmap():
    values = [x[:, None] for x in inputs()]
    assert named(jax.pmap(gradient(causal)).lower(*values).as_text()) == set()


def mesh(*shape, names=("data",)) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape) if shape else None]).reshape(shape or (-1,))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def with_slopes(q, k, v, slopes, implementation=None):
    bias = ALiBi(learned=True).bind({"slopes": slopes}, num_heads=slopes.shape[0])
    mask = Causal() & Segments(jnp.zeros(q.shape[:2], jnp.int32))
    return attention(q, k, v, bias=bias, mask=mask, implementation=implementation)


def over_devices(function):
    """On four devices, with varying axes checked: rows over one mesh axis, heads over the other."""
    rows, heads = P("data", None, "model"), P("model")
    return jax.shard_map(
        function, mesh=mesh(2, 2, names=("data", "model")), in_specs=(rows, rows, rows, heads), out_specs=rows
    )


def test_inside_shard_map_it_gives_what_one_device_gives():
    arguments = (*inputs(2), np.linspace(0.01, 0.1, HEADS, dtype=np.float32))

    def run(function):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.square(function(*x)).sum(), argnums=(0, 1, 2, 3)))(*arguments)

    found, want = run(over_devices(with_slopes)), run(partial(with_slopes, implementation="dense"))
    chex.assert_trees_all_close(jax.device_get(found), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "bias", ["learned", T5(num_buckets=8, max_distance=40), pytest.param(Sandwich(), marks=pytest.mark.wide)], ids=str
)
def test_inside_shard_map_it_is_the_kernel(bias):
    function, learned = with_slopes, np.ones(HEADS, np.float32)
    if bias != "learned":
        learned = np.ones((8, HEADS), np.float32)
        params = (lambda table: {"table": table}) if isinstance(bias, T5) else lambda _: None

        def function(q, k, v, table):
            return causal(q, k, v, bias=bias.bind(params(table), num_heads=HEADS))

    specs = (P("data"),) * 3 + (P(),)
    sharded = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=P("data"))
    assert kernels(gradient(sharded), *inputs(), learned) == GRADIENTS


def test_a_step_of_a_decoder_planned_on_a_cpu_holds_the_kernel():
    """As ``train`` plans it: parameters are replicated, rows are split over devices, blocks are in a scan."""
    config = pj.nn.DecoderConfig(
        vocab_size=32,
        num_layers=2,
        model_dim=64,
        num_heads=2,
        scheme=pj.scheme("alibi"),
        placement=Placement(batch=("data",)),
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: pj.nn.Decoder(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)

    def loss(state, tokens):
        return jnp.square(nnx.merge(graph, state)(tokens)).mean()

    with jax.set_mesh(mesh()):
        found = kernels(jax.grad(loss), state, tokens)
    assert found == GRADIENTS


@pytest.mark.parametrize("manual", [{"data"}, set()], ids=["over one axis of two", "nowhere"])
def test_a_mesh_that_the_compiler_divides_is_left_to_blockwise(manual):
    devices, rows = mesh(4, 2, names=("data", "model")), P("data")
    values = jax.device_put(inputs(), NamedSharding(devices, rows))

    def place(function):
        if not manual:
            return function
        return jax.shard_map(function, mesh=devices, in_specs=rows, out_specs=rows, axis_names=manual)

    assert kernels(place(causal), *values) == set()
    with pytest.raises(ValueError, match=r"does not split a TPU kernel over mesh axes \[.*'model'\]; pass partition="):
        jax.jit(place(partial(causal, implementation="tpu"))).trace(*values)


@pytest.mark.parametrize("implementation", [None, "tpu"])
def test_a_mesh_that_types_or_a_partition_divide_runs_the_kernel(implementation):
    rows, function = P("data", None, "model"), partial(causal, implementation=implementation)
    typed = jax.device_put(inputs(), NamedSharding(jax.make_mesh((4, 2), ("data", "model")), rows))
    assert kernels(gradient(function), *typed) == GRADIENTS
    partitioned = jax.device_put(inputs(), NamedSharding(mesh(4, 2, names=("data", "model")), rows))
    assert kernels(gradient(partial(function, partition=rows)), *partitioned) == GRADIENTS


def test_a_warning_says_that_a_partition_is_missing_for_the_kernel():
    """On a mesh of TPUs, and only where a partition would help."""
    chips = AbstractMesh(
        (8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("TPU v5e", None, "tpu")
    )
    sharding = NamedSharding(chips, P("data"))
    values = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs()]
    with pytest.warns(UserWarning, match=r"runs without its TPU kernel: .*partition=.*PartitionSpec\('data'"):
        jax.jit(lambda *x: causal(*x)).trace(*values)
    jax.jit(lambda *x: causal(*x, partition=P("data"))).trace(*values)
    jax.jit(lambda *x: causal(*x, bias=FIRE().bind(FIRE().init(jax.random.key(0), HEADS), num_heads=HEADS))).trace(
        *values
    )


# NVIDIA GPUs. None is needed: a stub of the library reports a version, and programs are lowered, not run.


@pytest.fixture
def gpu(monkeypatch):
    """Makes the host look as if it had an NVIDIA GPU and its libraries."""
    library = SimpleNamespace(cudnn_get_version=lambda: 91002)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", library)
    monkeypatch.setattr(cudnn, "has_gpu", lambda: True)
    yield
    jax.clear_caches()


HALF = partial(inputs, dtype=jnp.bfloat16)


def test_a_host_without_a_gpu_traces_nothing_of_cudnn(monkeypatch):
    tried = []
    monkeypatch.setattr(cudnn, "unsupported", lambda x: tried.append(x) or "it was tried")
    for has_gpu in (True, False):
        tried.clear()
        monkeypatch.setattr(cudnn, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        traced(causal, *HALF())
        assert bool(tried) == has_gpu


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("mask", "kind", "window", "implementation"),
    [
        (None, "NO_MASK", None, None),
        (Causal() & Window(100), "CAUSAL", 100, None),
        (Causal(), "CAUSAL", None, "cudnn"),
        (Window(100) & Causal(), "CAUSAL", 100, "cudnn"),
        pytest.param(Causal(), "CAUSAL", None, None, marks=pytest.mark.wide),
        pytest.param(Window(100) & Causal(), "CAUSAL", 100, None, marks=pytest.mark.wide),
    ],
)
def test_lowered_for_a_gpu_it_is_cudnn(mask, kind, window, implementation):
    attend = partial(attention, mask=mask, implementation=implementation)
    text = lowered(gradient(attend), *HALF(), platform="cuda")
    assert named(text) == {CUDNN, CUDNN_BACKWARD}
    assert set(re.findall(r"mask_type[^A-Z]+([A-Z_]+)", text)) == {kind}
    assert set(re.findall(r"sliding_window_length\\22: (\d+)", text)) == {str(window or 0)}
    assert set(re.findall(r"fmha_scale\\22: ([\d.]+)", text)) == {"1.0"}


@pytest.mark.usefixtures("gpu")
def test_a_gpu_on_the_host_changes_nothing_for_other_platforms():
    program = jax.jit(lambda *x: causal(*x)).trace(*HALF())
    found = {name: named(program.lower(lowering_platforms=(name,)).as_text()) for name in ("cuda", "tpu", "cpu")}
    assert found == {"cuda": {CUDNN}, "tpu": {FORWARD}, "cpu": set()}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("of", "error"),
    [
        (lambda f: f, (TypeError, r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function")),
        (gradient, (NotImplementedError, r"Differentiation rule for .* not implemented")),
    ],
    ids=["forward", "forward over reverse"],
)
def test_derivatives_that_cudnn_lacks_are_available_from_blockwise(of, error):
    def along(**options):
        return lambda *x: jax.jvp(of(partial(causal, **options)), x, x)[1]

    with pytest.raises(error[0], match=error[1]):
        lowered(along(), *HALF(), platform="cuda")
    lowered(along(implementation="blockwise"), *HALF(), platform="cuda")


@pytest.mark.usefixtures("gpu")
def test_cudnn_inside_shard_map():
    sharded = jax.shard_map(causal, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    assert kernels(gradient(sharded), *HALF(), platform="cuda") == {CUDNN, CUDNN_BACKWARD}


def test_without_a_gpu_a_program_for_one_is_blockwise(monkeypatch):
    assert kernels(causal, *HALF(), platform="cuda") == set()
    with pytest.raises(ValueError, match="implementation='cudnn': jax says: cuDNN is not detected"):
        traced(partial(causal, implementation="cudnn"), *HALF())
    library = SimpleNamespace(cudnn_get_version=lambda: 91002)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", library)
    assert kernels(causal, *HALF(), platform="cuda") == set()
    assert kernels(partial(causal, implementation="cudnn"), *HALF(), platform="cuda") == {CUDNN}


NOT_FOR_CUDNN = {
    "residuals": ({"return_residuals": True}, "log-sum-exp"),
    "sinks": ({"sinks": np.zeros(HEADS, np.float32)}, "log-sum-exp"),
    "bias": ({"bias": ALiBi(symmetric=True)}, "LinearBias"),
    "soft cap": ({"softcap": 30.0}, "soft cap"),
    "remap": ({"remap": FAR}, "remapped branches"),
    "decay": ({"decay": np.ones(SIZE)}, "decay of xPos"),
    "float32": ({"dtype": jnp.float32}, r"found \['float32'\]"),
    "window": ({"mask": Window(9)}, "no masks except Causal"),
    "or": ({"mask": Causal() | Window(9)}, "no masks except Causal"),
    "segments": ({"mask": Causal() & Segments(IDS)}, "no masks except Causal"),
    "later": ({"mask": Causal(), "q_positions": Range(1, TOKENS)}, "equal ranges of positions"),
    "array": ({"mask": Causal(), "q_positions": np.arange(TOKENS)}, "equal ranges of positions"),
    "sizes": ({"value_size": 8}, r"one size, a multiple of 8 up to 128, found \[8, 16\]"),
}


def not_for_cudnn(name: str) -> tuple:
    """An attention that cuDNN does not support, its arguments, and the reason."""
    settings, reason = NOT_FOR_CUDNN[name]
    settings = dict(settings)
    q, k, v = inputs(dtype=settings.pop("dtype", jnp.bfloat16))
    v = v[..., : settings.pop("value_size", SIZE)]
    return partial(attention, **settings), (q, k, v), reason


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", NOT_FOR_CUDNN)
def test_what_cudnn_does_not_take(name):
    function, arguments, reason = not_for_cudnn(name)
    with pytest.raises(ValueError, match=f"implementation='cudnn': .*{reason}"):
        traced(partial(function, implementation="cudnn"), *arguments)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("residuals", "bias", "segments", "sizes") else [pytest.mark.wide])
        for name in NOT_FOR_CUDNN
    ],
)
def test_what_cudnn_does_not_take_is_lowered_without_it(name):
    function, arguments, _ = not_for_cudnn(name)
    assert kernels(function, *arguments, platform="cuda") == set()


@pytest.mark.usefixtures("gpu")
def test_the_choice_and_its_reason_are_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="posjax"):
        traced(causal, *HALF())
        traced(partial(causal, bias=ALiBi()), *HALF())
    records = [record for record in caplog.records if record.name == "posjax"]
    assert [record.message for record in records] == [
        "attention on tpu: its own kernel",
        "attention on cuda: its own kernel",
        "attention on tpu: its own kernel",
        "attention on cuda: 'blockwise', because cuDNN does not know LinearBias",
    ]
    assert {record.levelno for record in records} == {logging.DEBUG}
