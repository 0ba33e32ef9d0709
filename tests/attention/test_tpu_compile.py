"""The TPU kernels through the real compiler, for every chip, without a TPU: ``pytest -m compile``.

Each program is compiled in a separate process. The compiler refuses what does not fit a chip's memory.
"""

import dataclasses
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from posjax.attention.call import Call
from posjax.attention.platform import computed, everywhere
from posjax.attention.tpu import blocks
from posjax.attention.tpu.backend import TPU
from posjax.attention.tpu.entry import Options
from posjax.bias import T5, ALiBi, ForgetBias, Kerple
from posjax.masks import Beyond, Causal, ChunksApart, FirstTokens, Mask, Segments, Window
from posjax.positions import Range
from posjax.remap import Branch
from train.lab.schedule.compiling import compile_for
from train.runtime.chips import CHIPS

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed"),
]

BIASES = {
    "alibi": ALiBi(),
    "learned alibi": ALiBi(learned=True),
    "symmetric alibi": ALiBi(symmetric=True),
    "t5": T5(),
    "two-sided t5": T5(bidirectional=True),
    "kerple": Kerple(),
}
REMAPPED = {"rerope": (Beyond(512),), "two branches": (ChunksApart(2048, 1, 1), ChunksApart(2048, 2))}
SHORT, LONG, MILLION = 8192, 131_072, 2**20
NAMED = ("causal", "alibi", "t5", "window and sinks", "segments", "rerope")
OTHERS = ("plain", "own mask", *(name for name in BIASES if name not in NAMED), "fox", "soft cap", "two branches")
chips = pytest.mark.parametrize("chip", CHIPS)


def program(
    chip: str,
    name: str,
    tokens: int,
    heads: int = 8,
    kv_heads: int = 8,
    size: int = 128,
    value_size: int | None = None,
    dtype: str = "bfloat16",
    backward: bool = True,
    mapped: int = 0,
):
    """A function and its abstract arguments; heads are side by side in memory, as in a model's projections."""
    on = next(known for known in blocks.TARGETS.values() if known.name == chip)
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    values = {
        "q": array((1, tokens, kv_heads, heads // kv_heads, size)),
        "k": array((1, tokens, kv_heads, size)),
        "v": array((1, tokens, kv_heads, value_size or size)),
    }
    for n in range(len(REMAPPED.get(name, ()))):
        values |= {f"q{n}": values["q"], f"k{n}": values["k"]}
    features = tuple(values)
    values |= parameters(name, heads, tokens)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def run(values, ids):
        values = values | {key: jnp.moveaxis(values[key], 1, -2) for key in features}
        call = Call(values["q"], values["k"], values["v"], **slots(name, values, ids, heads), scale=size**-0.5)
        out, lse = computed(everywhere(TPU(Options(on=on))), call)[:2]
        return jnp.moveaxis(out, -2, 1), lse

    def gradients(values, ids, d_out):
        return jax.vjp(lambda values: run(values, ids)[0], values)[1](d_out)

    d_out = array((*values["q"].shape[:-1], value_size or size))
    function, arguments = (gradients, [values, ids, d_out]) if backward else (run, [values, ids])
    if mapped:
        function = jax.vmap(function)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mapped, *x.shape), x.dtype), arguments)
    return function, arguments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arithmetic(Mask):
    """A user's mask with every operation that the kernels support: see ``formulas.OPERATIONS``."""

    def pairs(self, i, j):
        near = jnp.clip(abs(i - j), 0, 100) * (i - j) ** 2 < jnp.maximum(i // 8, j % 7) << 3
        signs = jnp.sign(i - j) == ((i >> 3) ^ (j & 1))
        return near | ~signs ^ (jnp.where(i < 5, -j, i).astype(jnp.float32) <= j / 2)


def parameters(name: str, heads: int, tokens: int) -> dict:
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    gates = array((1, heads, tokens))
    return {
        "t5": {"table": array((32, heads))},
        "two-sided t5": {"table": array((32, heads))},
        "kerple": {"a": array((heads,)), "p": array((heads,))},
        "learned alibi": {"slopes": array((heads,))},
        "fox": {"q_gates": gates, "kv_gates": gates},
    }.get(name, {})


def slots(name: str, values: dict, ids, heads: int) -> dict:
    """Bias, mask, soft cap, branches and positions of a program."""
    masks = {
        "window and sinks": Causal() & (Window(4096) | FirstTokens(4)),
        "segments": Causal() & Segments(ids),
        "own mask": Causal() & Arithmetic(),
    } | dict.fromkeys(("plain", "symmetric alibi", "two-sided t5"))
    bias = name in BIASES and BIASES[name].bind(values, num_heads=heads)
    return {
        "bias": ForgetBias(values["q_gates"], values["kv_gates"]) if name == "fox" else bias or None,
        "mask": masks.get(name, Causal()),
        "softcap": 30.0 if name == "soft cap" else None,
        "remap": tuple(
            Branch(values[f"q{n}"], values[f"k{n}"], where) for n, where in enumerate(REMAPPED.get(name, ()))
        ),
        "q_positions": Range(0, ids.shape[-1]),
        "kv_positions": Range(0, ids.shape[-1]),
    }


@pytest.fixture(autouse=True)
def _usual_flags(monkeypatch):
    """Compiles with default flags, without those that the other tests set for CPUs."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def temp_bytes(chip: str, name: str, tokens: int, **options) -> int:
    """Temporary main memory in the compiler's plan. If the compiler refuses, ``DoesNotCompile`` gives the reason."""
    return compile_for(
        chip, f"{__file__}:program", {"chip": chip, "name": name, "tokens": tokens, **options}
    ).temp_bytes


@chips
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_forward_and_backward_in_memory_linear_in_the_length(chip, name, tokens):
    """At most four float32 arrays of the size of the queries. One holds the sums of their gradients."""
    pairs = 2 if name == "rerope" else 1
    assert temp_bytes(chip, name, tokens) <= 4 * pairs * (8 * tokens * 128 * 4) + 2**20


@chips
@pytest.mark.parametrize(
    ("name", "tokens", "options"),
    [
        *((name, SHORT, {}) for name in OTHERS),
        *(("alibi", SHORT, {"size": size}) for size in (64, 80, 96, 192, 256)),
        ("alibi", SHORT, {"heads": 2, "kv_heads": 2, "dtype": "float32"}),
        *((name, LONG, {"heads": 16, "kv_heads": 2}) for name in ("alibi", "t5")),
        # Lengths that are not multiples of a tile.
        *(("t5", tokens, {}) for tokens in (100, 1000, 8300)),
        ("alibi", SHORT, {"mapped": 3}),
        # Latent attention of DeepSeek V3: expanded, and absorbed over one key head.
        *((name, SHORT, {"size": 192, "value_size": 128}) for name in ("causal", "rerope")),
        ("causal", SHORT, {"heads": 16, "kv_heads": 1, "size": 576, "backward": False}),
    ],
)
def test_every_form_of_bias_and_branches_size_and_length(chip, name, tokens, options):
    temp_bytes(chip, name, tokens, **options)


@pytest.mark.parametrize(("heads", "backward"), [(8, False), (4, True)])
def test_alibi_over_a_million_tokens_fits_one_v5e_chip(heads, backward):
    """16 GiB in all; the compiler refuses more. One head's logits alone would be 4 TiB."""
    temp_bytes("v5e", "alibi", MILLION, heads=heads, kv_heads=heads, backward=backward)
