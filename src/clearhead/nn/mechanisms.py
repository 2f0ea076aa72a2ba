"""Every mechanism of the house, one line each. To add one: write its file, add its line."""

from clearhead.nn import (
    alibi,
    bases,
    block,
    differential,
    differential_v2,
    forget,
    gate,
    hadamard,
    key_bias,
    key_value,
    positions,
    positionwise,
    rotary,
    scores,
    shaping,
    sink,
    softmax1,
    values,
    xsa,
)
from clearhead.nn.registry import REGISTRY

for declaration in (
    *bases.DECLARATIONS,
    *scores.DECLARATIONS,
    softmax1.DECLARATION,
    sink.DECLARATION,
    key_bias.DECLARATION,
    key_value.DECLARATION,
    differential.DECLARATION,
    differential_v2.DECLARATION,
    *shaping.DECLARATIONS,
    gate.DECLARATION,
    xsa.DECLARATION,
    *values.DECLARATIONS,
    *rotary.DECLARATIONS,
    alibi.DECLARATION,
    forget.DECLARATION,
    *positions.DECLARATIONS,
    *positionwise.DECLARATIONS,
    *hadamard.DECLARATIONS,
    *block.DECLARATIONS,
):
    REGISTRY.add(declaration)
