"""A trained model whose up projections have rows of one size: the same function, for few bits.

What a gated MLP's up projection makes is only multiplied: by the gate, and by the down projection.
So a row of it may be divided by a number, and the column of the down projection that reads it
multiplied by that number. Where one scale serves a whole matrix, the largest row no longer sets it
for all rows. It is the equalisation across layers of arXiv 1906.04721 (section 4.1), between two
matrices with no function between them.
"""

from copy import deepcopy

import torch

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.families.family import filled
from clearhead.ops.hadamard import rotate_channels


def equalised(model: ClearheadForCausalLM) -> ClearheadForCausalLM:
    """The same function with equal rows, by their largest weight, in every up projection; from
    copies of the weights in their dtype.

    Raises:
        ClearheadError: an MLP without a gate, whose function lies between the two matrices.
    """
    made = filled(ClearheadForCausalLM, deepcopy(model.config), model.state_dict(), model)
    with torch.no_grad():
        for index, layer in enumerate(made.model.layers):
            spec = made.config.layer(index)
            if not layer.mlp.gated:
                raise ClearheadError(
                    f"mlp={spec.mlp!r} has a function between its two matrices, so that no scale "
                    "passes from one to the other: --equalise takes mlp swiglu or geglu"
                )
            up, down = layer.mlp.up_proj, layer.mlp.down_proj.weight
            sizes_O = up.weight.double().abs().amax(1)
            scale_O = torch.where(sizes_O > 0, sizes_O / sizes_O.median(), 1.0)
            up.weight.copy_(up.weight.double() / scale_O[:, None])
            if up.bias is not None:
                up.bias.copy_(up.bias.double() / scale_O)
            # A rotation before the down projection is part of its weights.
            turn = rotate_channels if spec.mlp_rotation == "hadamard" else lambda x: x
            down.copy_(turn(turn(down.double()) * scale_O))
    return made
