"""Pure functions on tensors, each with an oracle of the same signature in `clearhead.ops.oracles`.

Shape suffixes: B batch, H query heads, G key/value heads (groups), T queries, S keys, D width of
queries and keys, V width of values, N rows.
"""

from clearhead.ops.attention import attend
from clearhead.ops.cross_entropy import linear_cross_entropy
from clearhead.ops.differential import differential, differential_v2
from clearhead.ops.norm import rms_norm
from clearhead.ops.rope import rotary_table, rotate

__all__ = [
    "attend",
    "differential",
    "differential_v2",
    "linear_cross_entropy",
    "rms_norm",
    "rotary_table",
    "rotate",
]
