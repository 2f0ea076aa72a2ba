"""Modules: the mechanisms of each axis, put together by `attention` and `block`.

Shape suffixes as in `clearhead.ops`; C is the width of the residual stream. To add a mechanism:
write its file with `DECLARATIONS`, and add its name here.
"""

from clearhead.nn import (
    bases,
    block,
    differential,
    normalizers,
    outputs,
    positions,
    positionwise,
    scores,
    values,
)
from clearhead.nn.block import Block, block_of
from clearhead.nn.init import initialise
from clearhead.nn.registry import REGISTRY

__all__ = ["REGISTRY", "Block", "block_of", "initialise"]

_AXES = bases, scores, normalizers, differential, outputs, values, positions, positionwise, block
for module in _AXES:
    for declaration in module.DECLARATIONS:
        REGISTRY.add(declaration)
