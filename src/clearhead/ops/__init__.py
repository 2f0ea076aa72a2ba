"""Pure functions on tensors; the oracle of each has its signature (`tests/ops/oracles.py`).

Shape suffixes: B batch, H query heads, G key/value heads (groups), T queries, S keys, D width of
queries and keys, V width of values, N rows.
"""

from clearhead.ops.alibi import alibi_columns, alibi_slopes, forget_columns, with_columns
from clearhead.ops.attention import attend
from clearhead.ops.coca import coca_keys, coca_queries
from clearhead.ops.cross_entropy import linear_cross_entropy
from clearhead.ops.differential import differential, differential_v2
from clearhead.ops.precision import rms_norm
from clearhead.ops.rope import (
    Rotation,
    dynamic_theta,
    frequencies,
    ntk_theta,
    rotary_table,
    rotate,
    xpos_tables,
)
from clearhead.ops.running_mean import running_mean
from clearhead.ops.shaped import shaped
from clearhead.ops.unrotated import attend_unrotated

__all__ = [
    "Rotation",
    "alibi_columns",
    "alibi_slopes",
    "attend",
    "attend_unrotated",
    "coca_keys",
    "coca_queries",
    "differential",
    "differential_v2",
    "dynamic_theta",
    "forget_columns",
    "frequencies",
    "linear_cross_entropy",
    "ntk_theta",
    "rms_norm",
    "rotary_table",
    "rotate",
    "running_mean",
    "shaped",
    "with_columns",
    "xpos_tables",
]
