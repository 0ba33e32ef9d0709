"""Local attention, for the batch rows and heads of one device: checks, bound biases, the choice of a backend, sinks."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from posjax._checks import check, check_array, check_choice, check_heads, shown
from posjax._lowered import PLATFORMS, mesh_of_types, split_by_compiler
from posjax._numbers import is_number
from posjax._shapes import grouped, ungrouped
from posjax.attention import cudnn
from posjax.attention.backends import BLOCKWISE, DENSE, TPU, scaled
from posjax.attention.blockwise import TILE_ELEMENTS
from posjax.attention.checks import check_masks, rates
from posjax.attention.contextual import blockwise_contextual, dense_contextual
from posjax.attention.operands import Operands, RemappedPair, checked_softcap, statistics_dtype, vary_alike
from posjax.attention.operation import Backends, attend, attend_here
from posjax.attention.own import checked, heads_of
from posjax.attention.padding import without_padded_gates, without_padding
from posjax.attention.rows import Rows, merged
from posjax.attention.tpu import entry
from posjax.bias import Bias, ContextualBias, array_bias
from posjax.bias.base import widened_leaves
from posjax.masks import Mask
from posjax.positions import Positions
from posjax.remap import Branch

BACKENDS = {"dense": DENSE, "blockwise": BLOCKWISE}
"""Backends that support every call and run on every platform."""
IMPLEMENTATIONS = (*BACKENDS, "tpu", "cudnn")
"""All names; ``tpu`` and ``cudnn`` run on one platform each and raise ValueError for calls that they do not support."""
CONTEXTUAL = {"dense": dense_contextual, "blockwise": blockwise_contextual}
"""Backends for biases that are functions of the scores (CoPE)."""

_LONGEST_DENSE = 512 * 512
"""The most pairs of a head for which ``dense`` may be the default: with more pairs it is faster to skip empty tiles."""

_log = logging.getLogger("posjax")


def operands(
    q, k, v, *, bias: Bias | None, mask: Mask | None, remap: tuple[Branch, ...], decay, softcap, positions: tuple
) -> Operands:
    """The checked operands of ``attention``, whose queries are not scaled yet.

    The caller has checked the shapes and ``positions`` (of the queries and of the keys), and has bound the bias.
    """
    if bias is not None:
        bias.check(q.shape[0], q.shape[1], k.shape[1])
    _check_remap(remap, decay, q, k)
    check_masks(q, k, mask, *(branch.mask for branch in remap))
    kv_heads = k.shape[2]
    q, k, v = without_padding(mask, q, k, v)
    remap = tuple(Branch(*without_padding(mask, b.q, b.k), b.mask) for b in remap)
    x = Operands(
        q=grouped(q, kv_heads),
        k=jnp.moveaxis(k, 1, 2),
        v=jnp.moveaxis(v, 1, 2),
        bias=without_padded_gates(mask, bias),
        mask=mask,
        q_positions=positions[0],
        kv_positions=positions[1],
        remap=tuple(RemappedPair(grouped(b.q, kv_heads), jnp.moveaxis(b.k, 1, 2), b.mask) for b in remap),
        decay=rates(decay, statistics_dtype(q)),
        softcap=checked_softcap(softcap, q),
    )
    return checked(x)


def finished(rows: Rows, sinks, return_residuals: bool):
    """The result of ``attention`` from the results of a backend."""
    out, lse, rest = (None if array is None else ungrouped(array) for array in rows[:3])
    if sinks is not None:
        out, lse = _with_sinks(out, lse, rest, sinks)
    return (out, lse) if return_residuals else out


def check_shapes(q, k, v) -> None:
    """Raises ValueError unless queries, keys and values fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    check(q.shape[0] == k.shape[0], f"k must have the batch of q, {q.shape[0]}, found shape {k.shape}")
    check(k.shape[:3] == v.shape[:3], f"v must have the batch, length and heads of k, {k.shape[:3]}, found {v.shape}")
    check(q.shape[3] == k.shape[3], f"k must have the head size of q, {q.shape[3]}, found shape {k.shape}")
    check(
        q.shape[2] % k.shape[2] == 0,
        f"the heads of q must be a multiple of those of k, found {q.shape[2]} and {k.shape[2]}",
    )


def _check_remap(remap: tuple[Branch, ...], decay, q, k) -> None:
    for branch in remap:
        found, wanted = (branch.q.shape, branch.k.shape), (q.shape, k.shape)
        check(found == wanted, f"remap: queries and keys must have the shapes of q and k, {wanted}, found {found}")
    if decay is not None:
        check_array("decay", decay)
        found = decay.shape
        check(found == q.shape[-1:], f"decay must have shape {q.shape[-1:]}, one rate per feature, found {found}")
        check(
            not remap, "decay: the decay of xPos reads true distances, which remapped branches replace; leave one out"
        )


def check_aligned(q, k, q_positions: Positions | None, reads_positions: bool) -> None:
    """Raises ValueError if queries and keys differ in number, positions matter, and ``q_positions`` is not given.

    The queries may be the last tokens (with a cache) or the first ones, and nothing in the call tells which.
    """
    queries, keys = q.shape[1], k.shape[1]
    fewer = queries < keys
    which_tokens, start = ("are the last of all tokens", f"{keys} - {queries}") if fewer else ("start at 0", "0")
    check(
        q_positions is not None or queries == keys or not reads_positions,
        f"q_positions must be given for {queries} queries and {keys} keys if positions matter; for queries that "
        f"{which_tokens} write q_positions=Range({start}, {queries}), with posjax.positions.Range",
    )


def reads_positions(bias: Bias | None, mask: Mask | None, remap, decay) -> bool:
    """Whether a call depends on positions."""
    read = any(slot.reads_positions for slot in (bias, mask) if slot is not None)
    return read or bool(remap) or decay is not None


def needs_ranges(x: Operands) -> bool:
    """Whether a call needs positions that are ranges or is faster with them: with decay, or with a bias by distance."""
    return x.decay is not None or entry.needs_ranges(x)


def grouped_scale(scale, q, kv_heads: int):
    """The scale as a number, or as an array of factors that broadcasts against grouped queries."""
    if scale is None or is_number(scale):
        return q.shape[-1] ** -0.5 if scale is None else float(scale)
    scale = widened_leaves(scale)
    if jnp.ndim(scale) == 0:
        return scale
    sizes = zip(reversed(scale.shape), reversed(q.shape[:3]), strict=False)
    fits = scale.ndim <= 3 and all(size in (1, wanted) for size, wanted in sizes)
    check(fits, f"scale must broadcast to [batch, queries, heads] = {q.shape[:3]}, found {scale.shape}")
    return grouped(jnp.broadcast_to(scale, q.shape[:3])[..., None], kv_heads)


def bind_bias(bias, heads: int) -> Bias | None:
    """A bound bias for ``heads`` heads, from a bound one, an array, or a spec without parameters."""
    if bias is None:
        return None
    if isinstance(bias, jax.Array | np.ndarray):
        bias = array_bias(bias)
    if not isinstance(bias, Bias):
        is_spec, found = hasattr(bias, "bind") and not isinstance(bias, type), type(bias).__name__
        found = f"{shown(bias)}: write {bias.__name__}(...)" if isinstance(bias, type) else found
        check(is_spec, f"bias must be a posjax bias, the spec of one, or an array, found {found}")
        bound = bias.bind(num_heads=heads)
        found = type(bound).__name__
        check(isinstance(bound, Bias), f"bias: {type(bias).__name__}.bind must return a Bias, found {found}")
        return bound
    if not isinstance(bias, ContextualBias):
        found = heads_of(bias)
        fits = found in (None, heads)
        check(fits, f"bias is bound for {found} heads, but q has {heads}")
    return widened_leaves(bias)


def run(implementation: str | None, x: Operands, scale, with_lse: bool) -> Rows:
    """The results for each query; all but the output may be None if the log-sum-exp is not wanted.

    Args:
        implementation: as in ``attention``.
        x: the operands, their queries not scaled yet.
        scale: factor of the queries.
        with_lse: whether the log-sum-exp is wanted.
    """
    small, contextual = _is_small(x), isinstance(x.bias, ContextualBias)
    if implementation is None and not (small or contextual):
        return _run_on_platform(x, scale, with_lse)
    implementation = implementation or ("dense" if small else "blockwise")
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn":
        return _run_on_cudnn(x, scale, with_lse)
    if implementation == "tpu":
        return _run_on_tpu(x, scale)
    if contextual:
        return CONTEXTUAL[implementation](*vary_alike((scaled(x, scale), x.q)))
    if implementation == "dense":
        return BACKENDS["dense"].forward(x, scale)
    return attend(Backends(BACKENDS["blockwise"]), *vary_alike((x, scale)))


def parts_by(implementation: str | None, x: Operands) -> Backends:
    """The backends for calls like ``x`` over part of the keys of a sequence.

    Raises ValueError for a backend that does not support such calls, which need the log-sum-exp.
    """
    if implementation is None and not _is_small(x):
        return Backends(BACKENDS["blockwise"], () if _tpu_refusal(x) else (("tpu", TPU()),))
    implementation = implementation or "dense"
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn":
        check((why := cudnn.refusal(x, True)) is None, f"implementation='cudnn': {why}")
    if implementation == "tpu":
        check((why := _tpu_refusal(x)) is None, f"implementation='tpu': {why}")
        return Backends(BACKENDS["blockwise"], tuple((platform, TPU()) for platform in PLATFORMS))
    return Backends(BACKENDS[implementation])


def _is_small(x: Operands) -> bool:
    """Whether all logits fit in one tile of ``blockwise``, so that ``dense`` needs no more memory.

    False for more than ``_LONGEST_DENSE`` pairs of a head, and for a symbolic batch.
    """
    batch, kv_heads, group, queries, _ = x.q.shape
    pairs = queries * x.k.shape[2]
    known = isinstance(batch, int)
    return known and pairs <= _LONGEST_DENSE and batch * kv_heads * group * pairs <= TILE_ELEMENTS


def _run_on_platform(x: Operands, scale, with_lse: bool) -> Rows:
    """The kernel of the platform that the program is lowered for, if it supports the call, otherwise ``blockwise``."""
    why = {"tpu": _tpu_refusal(x), "cuda": _cudnn_refusal(x, with_lse)}
    for platform, reason in why.items():
        choice = "its own kernel" if reason is None else f"'blockwise', because {reason}"
        _log.debug("attention on %s: %s", platform, choice)
    _warn_of_mesh(x, why["tpu"])
    kernels = () if why["tpu"] else (("tpu", TPU()),)

    def usual() -> Rows:
        rows = attend(Backends(BACKENDS["blockwise"], kernels), *vary_alike((x, scale)))
        return rows if with_lse else Rows(rows.out)

    if why["cuda"]:
        return usual()
    return jax.lax.platform_dependent(default=usual, cuda=lambda: Rows(cudnn.cudnn(scaled(x, scale))))


def _run_on_tpu(x: Operands, scale) -> Rows:
    backends = parts_by("tpu", x)
    x, scale = vary_alike((x, scale))
    try:
        # An interpreted kernel has side effects. JAX must know them when it traces, so the kernel is traced here.
        if jax.make_jaxpr(lambda: TPU().forward(x, scale))().effects:
            return attend_here(TPU(), x, scale)
        return attend(backends, x, scale)
    except (ValueError, NotImplementedError) as error:
        # When tracing, the platform is not known yet; without a TPU, jax raises later, when it lowers the program.
        if isinstance(x.q, jax.core.Tracer) or jax.default_backend() == "tpu":
            raise
        raise ValueError("implementation='tpu': found no TPU; use 'blockwise', or None to choose") from error


def _run_on_cudnn(x: Operands, scale, with_lse: bool) -> Rows:
    why = cudnn.refusal(x, with_lse) or cudnn.unsupported(x)
    check(why is None, f"implementation='cudnn': {why}")
    return Rows(cudnn.cudnn(scaled(x, scale)))


def _tpu_refusal(x: Operands) -> str | None:
    if axes := split_by_compiler(x.q, x.k, x.v):
        return (
            f"the compiler does not split a TPU kernel over mesh axes {axes}; pass partition=, the partition of the "
            "queries, for instance jax.sharding.PartitionSpec('data', None, 'tensor'), or placement of a DecoderConfig"
        )
    if jax.config.jax_enable_x64:
        return "with jax_enable_x64 the integers of a kernel would have 64 bits, which a TPU does not support"
    return entry.refusal(x)


def _warn_of_mesh(x: Operands, why: str | None) -> None:
    """Warns, on a mesh of TPUs, if the missing partition is the only reason why the kernel is not used."""
    device = mesh_of_types(x.q, x.k, x.v).abstract_device
    split = split_by_compiler(x.q, x.k, x.v)
    if device is not None and device.platform == "tpu" and split and entry.refusal(x) is None:
        warnings.warn(f"attention runs without its TPU kernel: {why}", stacklevel=2)


def _cudnn_refusal(x: Operands, with_lse: bool) -> str | None:
    """Why cuDNN is not the default for a call, or None; a host without a suitable GPU is a reason too."""
    if why := cudnn.refusal(x, with_lse):
        return why
    # The GPU is checked first, so that cuDNN is not traced on a host without one.
    return cudnn.unsupported(x) if cudnn.has_gpu() else "this host has no GPU that it runs on"


def _with_sinks(out, lse, rest, sinks):
    """``o exp(L - L')`` and ``L' = log(exp(L) + exp(sink))``: a sink has no value, so it only rescales."""
    sinks = jnp.broadcast_to(sinks.astype(lse.dtype)[None, None], lse.shape)
    found = merged(Rows(out, lse, rest), Rows(jnp.zeros_like(out), sinks, jnp.zeros_like(sinks)))
    # By ``where``, so that a NaN in the gradient of a query that sees no key does not reach the sinks.
    return jnp.where(jnp.isneginf(lse)[..., None], 0, found.out).astype(out.dtype), found.lse
