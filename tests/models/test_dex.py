"""DEX, a trained linear map of each head's output (arXiv 2505.16333), is another W_O."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import ClearheadConfig, ClearheadForCausalLM

from . import space

STRENGTH = 0.4


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_map_of_each_head_s_output_folds_into_the_output_projection(groups):
    """o − λ o W, head by head, before W_O; so `--train.only '*o_proj*'` can learn all of it."""
    config = ClearheadConfig(**space.SHAPE | {"num_key_value_heads": groups})
    model = ClearheadForCausalLM(config).double().eval()
    heads = config.num_attention_heads, config.head_dim
    maps = [torch.randn(*heads, config.head_dim).double() for _ in model.model.layers]
    projections: list[Any] = [layer.self_attn.o_proj for layer in model.model.layers]
    x = torch.randn(2, 7, config.hidden_size, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[Tensor, Tensor]:
        logits = model(inputs_embeds=x, use_cache=False).logits
        return logits, torch.autograd.grad(logits.sin().sum(), x)[0]

    def mapped(o_BTC: Tensor, map_HDD: Tensor) -> Tensor:
        o_BTHD = o_BTC.unflatten(-1, heads)
        return (o_BTHD - STRENGTH * torch.einsum("bthd,hde->bthe", o_BTHD, map_HDD)).flatten(2)

    plain, _ = run()
    hooks = [
        projection.register_forward_pre_hook(lambda _, given, own=own: mapped(given[0], own))
        for projection, own in zip(projections, maps, strict=True)
    ]
    wanted = run()
    for hook, projection, own in zip(hooks, projections, maps, strict=True):
        hook.remove()
        weight_HDC = projection.weight.detach().T.unflatten(0, heads)
        folded_HDC = weight_HDC - STRENGTH * own @ weight_HDC
        projection.weight.data.copy_(folded_HDC.flatten(0, 1).T)
    assert (wanted[0] - plain).abs().max() > 1e-3
    for found, expected in zip(run(), wanted, strict=True):
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
