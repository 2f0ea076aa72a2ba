"""Every built-in mechanism. To add one: write its file with `DECLARATIONS`, add its name."""

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
from clearhead.nn.registry import REGISTRY

for module in (
    *(bases, coca, pope, null_keys, softpick, differential, shaping, gate, xsa, values),
    *(rotary, alibi, forget, positions, positionwise, hadamard, block),
):
    for declaration in module.DECLARATIONS:
        REGISTRY.add(declaration)
