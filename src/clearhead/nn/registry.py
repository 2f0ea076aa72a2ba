"""Every mechanism of the house, one line each. To add one: write its file, add its line."""

from clearhead.nn import (
    alibi,
    differential,
    differential_v2,
    direction,
    mlps,
    norms,
    positions,
    rotary,
    scores,
    single,
    sink,
    softmax,
    softmax1,
)
from clearhead.spec import Registry

REGISTRY = Registry(
    [
        scores.DOT,
        scores.EXACT,
        scores.STRICT,
        scores.SLACK,
        softmax.DECLARATION,
        softmax1.DECLARATION,
        sink.DECLARATION,
        single.DECLARATION,
        differential.DECLARATION,
        differential_v2.DECLARATION,
        rotary.ROPE,
        rotary.XPOS,
        alibi.DECLARATION,
        positions.LEARNED,
        positions.SINUSOIDAL,
        positions.SCALED_SINUSOIDAL,
        positions.NONE,
        direction.CAUSAL,
        direction.BIDIRECTIONAL,
        norms.RMSNORM,
        norms.RMSNORM_SINGLE,
        norms.LAYERNORM,
        mlps.SWIGLU,
        mlps.GEGLU,
        mlps.GELU,
        mlps.RELU,
    ]
)
