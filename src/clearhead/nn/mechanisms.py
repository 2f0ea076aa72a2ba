"""Every built-in mechanism. To add one: write its file with `DECLARATIONS`, add its name."""

from clearhead.nn import (
    bases,
    block,
    differential,
    epilogues,
    normalizers,
    positions,
    positionwise,
    scores,
    shaping,
    values,
)
from clearhead.nn.registry import REGISTRY

for module in (
    *(bases, scores, normalizers, differential, shaping, epilogues, values),
    *(positions, positionwise, block),
):
    for declaration in module.DECLARATIONS:
        REGISTRY.add(declaration)
