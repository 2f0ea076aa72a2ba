"""A trained model whose up projections have rows of one size: the same function, for few bits.

What a gated MLP's up projection makes is only multiplied: by the gate, and by the down projection.
So a row of it may be divided by a number, and the column of the down projection that reads it
multiplied by that number. Where one scale serves a whole matrix, the largest row no longer sets it
for all rows. Scales pass from one matrix to the next as in arXiv 1906.04721 (section 4.1), where
each takes half. Here the down projection takes them whole: its rotation mixes its columns
afterwards, so that none of them stands out.
"""

from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.models.families.family import filled
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.ops.hadamard import rotate_channels

SMALLEST = 1e-3
"""A row smaller than this share of the median is enlarged as if it had it: a row of hardly any
weight, whose bias would grow without bounds."""


def equalised(model: ClearheadForCausalLM) -> ClearheadForCausalLM:
    """The same function with equal rows, by their largest weight, in every up projection; its other
    weights are those of the model itself, which `check_equalised` accepts."""
    check_equalised(model)
    made = filled(ClearheadForCausalLM, model.config, model.state_dict(), model, share=True)
    with torch.no_grad():
        for layer in made.model.layers:
            up, down = layer.mlp.up_proj, layer.mlp.down_proj.weight
            sizes_O = up.weight.double().abs().amax(1)
            if not (nonzero := sizes_O[sizes_O > 0]).numel():
                continue  # a projection of zeros has nothing to scale
            scale_O = (sizes_O / nonzero.median()).clamp(min=SMALLEST)
            scale_O = torch.where(sizes_O > 0, scale_O, 1.0)
            # New tensors: the model keeps its own.
            up.weight.data = (up.weight.double() / scale_O[:, None]).to(made.dtype)
            if up.bias is not None:
                up.bias.data = (up.bias.double() / scale_O).to(made.dtype)
            # The rotation before the down projection is part of its weights.
            down.data = rotate_channels(rotate_channels(down.double()) * scale_O).to(made.dtype)
    return made


def check_equalised(model: ClearheadForCausalLM) -> None:
    """Refuse a model whose rows cannot be made equal; it may be one without weights.

    Raises:
        ClearheadError: an MLP without a gate, whose function lies between the two matrices, or
            without a rotation, where columns of the down projection would become unequal.
    """
    for index, layer in enumerate(model.model.layers):
        mlp: Any = layer.mlp
        spec = model.config.layer(index)
        if not mlp.gated:
            raise ClearheadError(
                f"mlp={spec.mlp!r} has a function between its two matrices, so that no scale "
                "passes from one to the other: --equalise takes mlp swiglu or geglu"
            )
        if spec.mlp_rotation != "hadamard":
            raise ClearheadError(
                "--equalise gives the sizes of rows to columns of the down projections, which "
                "only a rotation evens out: give --rotate down too"
            )
