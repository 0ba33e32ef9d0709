"""Collinear constrained attention in one call."""

from jaxtyping import Array, Float

from posjax import coca
from posjax.attention.entrance import attention
from posjax.attention.padding import without_padding
from posjax.rotary import RotaryTable


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
