"""The public functions: ``attention``, and ``coca_attention`` for the features of CoCA."""

from collections.abc import Sequence
from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax import coca
from posjax._shapes import ungrouped
from posjax.attention.call import bind_bias, call_of, check_masks, check_scale, check_shapes, sinks_of
from posjax.attention.padding import without_padding
from posjax.attention.placement import Placement
from posjax.attention.platform import attend
from posjax.attention.rows import Rows, merged
from posjax.attention.sharded.mesh import Partition, over_mesh, split_of
from posjax.attention.sharded.strategies import spread
from posjax.bias import BiasSpec
from posjax.masks import Mask, as_mask
from posjax.positions import Positions
from posjax.remap import Branch, branches
from posjax.rotary import RotaryTable


@overload
def attention(
    q: Float[Array, "batch queries heads size"],
    k: Float[Array, "batch keys kv_heads size"],
    v: Float[Array, "batch keys kv_heads value_size"],
    *,
    bias=None,
    mask: Mask | Bool[Array, "..."] | None = None,
    scale: float | Float[Array, "..."] | None = None,
    sinks: Float[Array, "*b heads"] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    remap: Branch | Sequence[Branch] = (),
    decay: Float[Array, "size"] | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    implementation: str | None = None,
    placement: Placement | Partition | None = None,
    return_residuals: Literal[False] = False,
) -> Float[Array, "batch queries heads value_size"]: ...


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_residuals: Literal[True], **options
) -> tuple[Float[Array, "batch queries heads value_size"], Float[Array, "batch queries heads"]]: ...


def attention(
    q: Float[Array, "batch queries heads size"],
    k: Float[Array, "batch keys kv_heads size"],
    v: Float[Array, "batch keys kv_heads value_size"],
    *,
    bias=None,
    mask: Mask | Bool[Array, "..."] | None = None,
    scale: float | Float[Array, "..."] | None = None,
    sinks: Float[Array, "*b heads"] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    remap: Branch | Sequence[Branch] = (),
    decay: Float[Array, "size"] | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    implementation: str | None = None,
    placement: Placement | Partition | None = None,
    return_residuals: bool = False,
) -> Float[Array, "batch queries heads value_size"] | tuple[Array, Array]:
    """Softmax attention with any relative bias and any mask.

        z_h(i, j) = scale <q_i, k_j> + bias_h(p_i, p_j)
        z = softcap * tanh(z / softcap),  z = -inf where the mask forbids
        o_i = sum_j exp(z_ij) v_j / (sum_j exp(z_ij) + exp(sink_h))

    Every backend uses this order. A query that may see no key gives exactly 0, with zero gradients. Logits and
    statistics are at least float32. Tokens with a negative id in ``masks.Segments`` are padding and may hold NaN
    (unless the mask has ``finite=True``): they affect no output and no gradient.

    Args:
        q: queries.
        k: keys; ``heads`` must be a multiple of ``kv_heads``, query head ``n`` uses key head
            ``n // (heads // kv_heads)``.
        v: values; their size may differ from that of the keys.
        bias: a bound ``bias.Bias``, the spec of one without parameters (``bias.ALiBi()``), or an array that broadcasts
            to ``[batch, heads, queries, keys]``. Its parameters, or the array, get gradients.
        mask: a ``masks.Mask``, or a boolean array that broadcasts to ``[batch, heads, queries, keys]``, true where a
            query may see a key; without a mask every query sees every key. Masks and arrays can be combined:
            ``Causal() & array``.
        scale: factor of the queries, a number or an array that broadcasts to ``[batch, queries, heads]``;
            ``1 / sqrt(size)`` when left out.
        sinks: one learned logit per head, ``[heads]``, that takes part in the normalisation and has no value (gpt-oss);
            or one for each query and head, ``[batch, queries, heads]`` (Inkling 2).
        softcap: bound of the logits (Gemma 2), or None; a scalar array, which may be learned.
        remap: ``posjax.remap.Branch`` or several: other queries and keys, used for the pairs of tokens in their masks
            (ReRoPE). ``scale`` multiplies these queries too.
        decay: rates ``a >= 0`` of xPos, ``[size]``: the score becomes ``sum_c q_c k_c exp(-a_c (i - j))``. It does not
            overflow at any length if no query sees a key ahead of it and no tile spans more than about ``40 / max(a)``
            positions (16,000 in xPos; ``"dense"`` has one tile). The rates get no gradient. Negative rates raise
            ValueError; traced ones count as 0.
        q_positions: ``Range``, int32 ``[queries]`` or ``[batch, queries]``; ``0, 1, 2, ...`` when left out. Without
            them ValueError is raised if queries and keys differ in number and the call depends on positions.
        kv_positions: the same for the keys; ``0, 1, 2, ...`` when left out.
        implementation: ``"dense"`` (quadratic memory) and ``"blockwise"`` (linear) support every call on every
            platform. Some calls are supported by ``"tpu"`` and ``"gpu"``, kernels with linear memory, the second one
            for NVIDIA's H100 and its like with jax 0.11 or newer, and by ``"cudnn"`` on NVIDIA GPUs, for example
            without bias or with ALiBi whose slopes are fixed. None: ``"dense"`` for few logits (at most 2^21 over batch
            and heads, and 512 x 512 of a head), otherwise the kernel of the platform the program is lowered for, or
            ``"blockwise"`` if there is none or it does not support the call; on a GPU a warning says so. For calls that
            are not small the logger ``"posjax"`` reports the choice and the reason, at debug level. The choice is made
            when the program is lowered, also for several platforms at once (``jax.export``). A symbolic batch counts as
            large.
        placement: how the call is split over a mesh. Outside ``shard_map``: how the queries are split over the Auto
            axes of a mesh, as a ``NamedSharding``, or a ``PartitionSpec`` for the mesh in use or the mesh of the
            arrays, with the axes of the batch first and those of the heads third. Attention then runs on every device
            inside ``jax.shard_map``. Without a placement the compiler splits everything except the kernels. Explicit
            axes need none: the types of ``q``, ``k`` and ``v`` contain it. Key heads are repeated if the axis of the
            heads does not divide their number. Inside ``shard_map``: a ``sharded.Placement``, which may also split
            the sequence; it says what the other arguments are then.
        return_residuals: also return the log-sum-exp of every query, sinks included, float32
            ``[batch, queries, heads]``; for a query that sees no key it is the sink, or minus infinity without one. Its
            gradient is exact, so parts of a longer sequence can be merged; give the sinks to one part only. It is
            rounded: under an additive mask of -1e9 it is -1e9 for any number of keys, so parts that are merged by it
            get equal weights there.

    Returns:
        The output in the dtype of ``v``, or the pair of output and log-sum-exp.

    Raises:
        ValueError: for shapes that do not fit, naming the argument; for a bias that grows without bound for keys ahead
            (one-sided ALiBi) if a query is known to see one; for a backend that does not support the call, with the
            reason; for a split that is not possible, with the reason.
    """
    arguments = {"bias": bias, "mask": mask, "scale": scale, "softcap": softcap, "remap": remap, "decay": decay}
    arguments |= {"q_positions": q_positions, "kv_positions": kv_positions}
    if not isinstance(placement, Placement):
        check_shapes(q, k, v)
        split = split_of(q, k, v, placement)
        if split is not None:
            options = {"sinks": sinks, "implementation": implementation, "return_residuals": return_residuals}
            return _over_mesh(*split, q, k, v, **arguments, **options)
        placement = Placement()
    call = call_of(q, k, v, placement=placement, **arguments)
    sinks = sinks_of(placement, sinks, q, call.mask)
    with_lse = return_residuals or sinks is not None
    if placement.is_empty:
        rows = attend(implementation, call, with_lse)
    else:
        rows = spread(placement, call, implementation, with_lse)
    return result_of(rows, sinks, return_residuals)


def _over_mesh(mesh, placement: Placement, q, k, v, *, bias, mask, scale, remap, sinks, **options):
    """Attention on every device, for its own batch rows and heads."""
    check_scale(scale)
    mask = None if mask is None else as_mask(mask)
    remap = branches(remap)
    check_masks(q, k, mask, *(branch.mask for branch in remap))
    arguments = options | {
        # A spec is bound on every device, because arrays that are passed to one are no longer known when tracing.
        "bias": bias if isinstance(bias, BiasSpec) else bind_bias(bias, q.shape[2]),
        "mask": mask,
        "scale": _with_three_axes(scale),
        "sinks": sinks_of(Placement(), sinks, q),
        "masks": tuple(branch.mask for branch in remap),
    }

    def inside(q, k, v, *features, masks, **others):
        count = len(masks)
        remap = tuple(map(Branch, features[:count], features[count:], masks))
        return attention(q, k, v, remap=remap, **others)

    features = [*(branch.q for branch in remap), *(branch.k for branch in remap)]
    return over_mesh(mesh, placement, inside, [q, k, v, *features], None, arguments)


def _with_three_axes(scale):
    """An array of factors as ``[batch or 1, queries or 1, heads or 1]``; a number or None unchanged."""
    if scale is None or jnp.ndim(scale) in (0, 3):
        return scale
    return jnp.reshape(scale, (1,) * (3 - jnp.ndim(scale)) + jnp.shape(scale))


def result_of(rows: Rows, sinks, return_residuals: bool):
    """The result of ``attention`` from the results of a backend."""
    out, lse, rest = (None if array is None else ungrouped(array) for array in rows[:3])
    if sinks is not None:
        out, lse = _with_sinks(out, lse, rest, sinks)
    return (out, lse) if return_residuals else out


def _with_sinks(out, lse, rest, sinks):
    """``o exp(L - L')`` and ``L' = log(exp(L) + exp(sink))``: a sink has no value, so it only rescales."""
    sinks = sinks.astype(lse.dtype)
    sinks = sinks if sinks.ndim == 3 else jnp.broadcast_to(sinks[None, None], lse.shape)
    with_sink = merged(Rows(out, lse, rest), Rows(jnp.zeros_like(out), sinks, jnp.zeros_like(sinks)))
    # By ``where``, so that a NaN in the gradient of a query that sees no key does not reach the sinks.
    return jnp.where(jnp.isneginf(lse)[..., None], 0, with_sink.out).astype(out.dtype), with_sink.lse


def coca_attention(
    q: Float[Array, "batch queries heads size"],
    t: Float[Array, "batch keys kv_heads half"],
    v: Float[Array, "batch keys kv_heads value_size"],
    *,
    table: RotaryTable,
    kv_table: RotaryTable | None = None,
    variant: coca.Variant = "strict",
    pairing: coca.Pairing = "half",
    **options,
) -> Float[Array, "batch queries heads value_size"] | tuple[Array, Array]:
    """Softmax attention over CoCA scores (Zhu et al., arXiv 2309.08646), at the cost of ordinary attention.

        z_h(i, j) = scale phi(q_i, p_i) . psi(t_j, p_j) + bias_h(p_i, p_j)

    with the features of ``posjax.coca.features`` and ``scale = 1 / sqrt(d)`` by default, where ``d`` is twice the width
    of ``t``. There is no mask unless one is given.

    Args:
        q: queries before rotation, ``d`` wide (``d / 2`` for ``"tied"``).
        t: key projection, ``d / 2`` wide, raw or from ``posjax.coca.half_width``; may have fewer heads.
        v: values, any width.
        table: rotation of the whole head at the positions of the queries, as ``posjax.rotary_table`` makes it.
        kv_table: the same for the keys; ``table`` if absent.
        variant: ``"strict"``, ``"tied"``, ``"slack"`` (what the released code computes) or ``"relative"``.
        pairing: which channels of ``q`` form a plane.
        options: those of ``posjax.attention``: ``bias``, ``mask``, ``scale``, ``sinks``, ``softcap``, ``q_positions``,
            ``kv_positions`` (for bias and mask; the rotation is in the tables), ``implementation``,
            ``return_residuals``.

    Returns:
        As ``posjax.attention``: ``[batch, queries, heads, value_size]`` in the dtype of ``v``.

    Raises:
        ValueError: as ``posjax.coca.features`` and ``posjax.attention`` do.
    """
    q, t, v = without_padding(options.get("mask"), q, t, v)
    phi, psi = coca.features(q, t, table, kv_table=kv_table, variant=variant, pairing=pairing)
    return attention(phi, psi, v, **options)
