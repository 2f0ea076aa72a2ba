"""Every mechanism of the house, one line each. To add one: write its file, add its line.

Other packages add theirs by `register`.
"""

import sys

from clearhead.nn import (
    alibi,
    annealed,
    differential,
    differential_v2,
    direction,
    epilogues,
    gains,
    gate,
    hadamard,
    key_bias,
    key_value,
    mlps,
    norms,
    positions,
    qk_norm,
    residual,
    rotary,
    scores,
    shaped,
    shaping,
    sink,
    skipinit,
    softmax,
    softmax1,
    standard,
    values,
    xsa,
)
from clearhead.spec import Declaration, Registry

REGISTRY = Registry(
    [
        scores.DOT,
        scores.EXACT,
        scores.STRICT,
        scores.SLACK,
        qk_norm.NONE,
        qk_norm.RMSNORM,
        softmax.DECLARATION,
        softmax1.DECLARATION,
        sink.DECLARATION,
        key_bias.DECLARATION,
        key_value.DECLARATION,
        standard.DECLARATION,
        differential.DECLARATION,
        differential_v2.DECLARATION,
        shaping.DECLARATION,
        skipinit.DECLARATION,
        shaped.DECLARATION,
        annealed.DECLARATION,
        epilogues.DECLARATION,
        gate.DECLARATION,
        xsa.DECLARATION,
        values.LINEAR,
        values.IDENTITY,
        values.REPARAMETRISED,
        values.LINEAR_PROJECTION,
        values.IDENTITY_PROJECTION,
        values.REPARAMETRISED_PROJECTION,
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
        norms.NONE,
        mlps.SWIGLU,
        mlps.GEGLU,
        mlps.GELU,
        mlps.GELU_EXACT,
        mlps.RELU,
        hadamard.NONE,
        hadamard.HADAMARD,
        residual.SEQUENTIAL,
        residual.PARALLEL,
        residual.ATTENTION_IDENTITY,
        residual.ATTENTION_NONE,
        residual.MLP_IDENTITY,
        residual.MLP_NONE,
        gains.TRAINABLE,
        gains.SCHEDULED,
        gains.FEEDBACK,
    ]
)
"""The values of every axis, with the modules that implement them."""


def register(declaration: Declaration) -> None:
    """Add a mechanism of another package, which is the module that calls this.

    Models with it name the package in their configuration's `requires`.

    Raises:
        ClearheadError: the axis or the name of the mechanism does not fit.
    """
    package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
    REGISTRY.add(declaration, package)
