"""Collinear constrained attention, CoCA (Zhu et al., arXiv 2309.08646), as a feature map.

Per head of size ``d``, plane ``j`` of the query is ``(x, y)``, the key is one number ``t_j >= 0`` for each of the
``d / 2`` planes, and ``theta_j`` is the frequency of the plane. The collinear constraint multiplies the key by the
query, ``k_{m,n} = q_m * t_n``, so that the angle between them is zero at distance zero:

    strict(m, n) = sum_j t_{n,j} (x_{m,j}^2 + y_{m,j}^2) cos((m - n) theta_j)

The paper computes this as a three-way product that costs ``O(n^2 d)`` memory, so its code uses another score. But the
strict score is a plain inner product ``phi(q, m) . psi(t, n)`` of ``d`` features, and so are its variants: any
attention kernel runs them at the usual cost. With ``c_p = cos(p theta_j)``, ``s_p = sin(p theta_j)``, in each plane

    psi           t (c_n, s_n)                                     for every variant
    phi strict    (x^2 + y^2) (c_m, s_m)                           equations 4 to 9, 17: free queries
    phi tied      2 x^2 (c_m, s_m)                                 the same with y = x: the paper's own constraint
    phi slack     ((x^2 + y^2) c_m, 2 x y s_m + (y^2 - x^2) c_m)   what the released code computes
    phi relative  (u^2 c_m - u w s_m, u^2 s_m + u w c_m)           slack without its absolute part

where ``u = (x + y) / sqrt(2)`` and ``w = (y - x) / sqrt(2)``. Strict, tied and relative depend only on ``m - n``.
Slack also has ``t (w^2 cos((m + n) theta) + u w sin((m + n) theta))``, so shifting all positions changes it.

Features are quadratic in the query: they are built in float32 and cast last; do not use float16. A cache should hold
``half_width(t)``, half as wide as an ordinary key and without positions, and rotate on read.
"""

from posjax.coca.feature import (
    VARIANTS,
    Coca,
    Pairing,
    Variant,
    features,
    half_width,
    key_feature,
    merge_projection,
    query_feature,
)
from posjax.coca.partly import PartlyCollinear

__all__ = [
    "VARIANTS",
    "Coca",
    "Pairing",
    "PartlyCollinear",
    "Variant",
    "features",
    "half_width",
    "key_feature",
    "merge_projection",
    "query_feature",
]
