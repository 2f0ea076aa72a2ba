"""Pure functions on tensors; each has an oracle of the same signature (`tests/ops/oracles.py`).

Shape suffixes: B batch, H query heads, G key/value heads (groups), T queries, S keys, D width of
queries and keys, V width of values, N rows.
"""

from clearhead.ops.alibi import alibi_columns as alibi_columns
from clearhead.ops.alibi import alibi_slopes as alibi_slopes
from clearhead.ops.alibi import forget_columns as forget_columns
from clearhead.ops.alibi import with_columns as with_columns
from clearhead.ops.attention import attend as attend
from clearhead.ops.attention import attend_unrotated as attend_unrotated
from clearhead.ops.coca import coca_keys as coca_keys
from clearhead.ops.coca import coca_queries as coca_queries
from clearhead.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
from clearhead.ops.differential import differential as differential
from clearhead.ops.differential import differential_v2 as differential_v2
from clearhead.ops.precision import rms_norm as rms_norm
from clearhead.ops.rope import Rotation as Rotation
from clearhead.ops.rope import dynamic_theta as dynamic_theta
from clearhead.ops.rope import frequencies as frequencies
from clearhead.ops.rope import ntk_theta as ntk_theta
from clearhead.ops.rope import rotary_table as rotary_table
from clearhead.ops.rope import rotate as rotate
from clearhead.ops.rope import xpos_tables as xpos_tables
from clearhead.ops.running_mean import running_mean as running_mean
from clearhead.ops.running_mean import shaped as shaped
