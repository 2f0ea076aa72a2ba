"""Every mechanism of the house, one line each. To add one: write its file, add its line."""

from clearhead.nn import (
    differential,
    differential_v2,
    mlps,
    norms,
    positions,
    single,
    sink,
    softmax,
    softmax1,
)
from clearhead.spec import Registry

REGISTRY = Registry(
    [
        single.DOT,
        softmax.DECLARATION,
        softmax1.DECLARATION,
        sink.DECLARATION,
        single.DECLARATION,
        differential.DECLARATION,
        differential_v2.DECLARATION,
        positions.ROPE,
        positions.LEARNED,
        positions.NONE,
        norms.RMSNORM,
        norms.RMSNORM_SINGLE,
        norms.LAYERNORM,
        mlps.SWIGLU,
        mlps.GELU,
        mlps.RELU,
    ]
)
