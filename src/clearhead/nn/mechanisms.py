"""Every built-in mechanism. To add one: write its file with `DECLARATIONS`, add its name."""

from clearhead.nn import (
    alibi_forget,
    bases,
    block,
    coca,
    differential,
    epilogues,
    hadamard,
    null_keys,
    pope,
    positions,
    positionwise,
    rotary,
    shaping,
    softpick,
    values,
)
from clearhead.nn.registry import REGISTRY

for module in (
    *(bases, coca, pope, null_keys, softpick, differential, shaping, epilogues, values),
    *(rotary, alibi_forget, positions, positionwise, hadamard, block),
):
    for declaration in module.DECLARATIONS:
        REGISTRY.add(declaration)
