"""One layer: attention and an MLP around the residual stream."""

from typing import Any

from torch import Tensor, nn

from clearhead.nn.attention import Attention
from clearhead.nn.registry import REGISTRY
from clearhead.spec import LayerSpec


class Block(nn.Module):
    """The pre-norm block: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        norm = REGISTRY.find("norm", layer.norm).build
        self.input_layernorm = norm(layer.hidden_size, layer.norm_eps)
        self.self_attn = Attention(layer)
        self.post_attention_layernorm = norm(layer.hidden_size, layer.norm_eps)
        self.mlp = REGISTRY.find("mlp", layer.mlp).build(layer)
        self.dropout = nn.Dropout(layer.dropout)

    def forward(self, x_BTC: Tensor, **context: Any) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.self_attn(self.input_layernorm(x_BTC), **context))
        return x_BTC + self.dropout(self.mlp(self.post_attention_layernorm(x_BTC)))
