"""Modules: the mechanisms of each axis, put together by `attention` and `block`.

Shape suffixes as in `clearhead.ops`; C is the width of the residual stream. To add a mechanism:
write its file with `DECLARATIONS`, and add its name here.
"""

from clearhead.nn import (
    alibi,
    bases,
    block,
    coca,
    differential,
    forget,
    gate,
    hadamard,
    null_keys,
    pope,
    positions,
    positionwise,
    rotary,
    shaping,
    softpick,
    values,
    xsa,
)
from clearhead.nn.block import Block, block_of
from clearhead.nn.init import initialise
from clearhead.nn.registry import REGISTRY

__all__ = ["REGISTRY", "Block", "block_of", "initialise"]

for module in (
    *(bases, coca, pope, null_keys, softpick, differential, shaping, gate, xsa, values),
    *(rotary, alibi, forget, positions, positionwise, hadamard, block),
):
    for declaration in module.DECLARATIONS:
        REGISTRY.add(declaration)
