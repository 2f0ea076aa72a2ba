"""One layer: attention and an MLP around the residual stream."""

from typing import Any

from torch import Tensor, nn

from clearhead.nn.attention import Attention
from clearhead.nn.gains import Trainable, gain
from clearhead.nn.identity import Identity
from clearhead.nn.registry import REGISTRY
from clearhead.spec import LayerSpec


class Block(nn.Module):
    """Attention and an MLP, in the order, with the skips and the gains that the layer's axes name.

    The pre-norm block is x + attention(norm x), then x + mlp(norm x).
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        norm = REGISTRY.find("norm", layer.norm).build
        scale = REGISTRY.find("residual_scale", layer.residual_scale).build
        self.order = REGISTRY.find("order", layer.order).build()
        self.input_layernorm = norm(layer.hidden_size, layer.norm_eps)
        self.self_attn = Attention(layer)
        self.attention_gain = gain(scale, layer.attention_gain)
        self.attention_skip = REGISTRY.find("attention_skip", layer.attention_skip).build()
        if self.order.norms == 2:
            self.post_attention_layernorm = norm(layer.hidden_size, layer.norm_eps)
        rotation = REGISTRY.find("mlp_rotation", layer.mlp_rotation).build
        mlp = REGISTRY.find("mlp", layer.mlp).build
        self.mlp = mlp(layer, rotation(layer.intermediate_size))
        self.mlp_gain = gain(scale, layer.mlp_gain)
        self.mlp_skip = REGISTRY.find("mlp_skip", layer.mlp_skip).build()
        self.mlp_skip_gain = gain(Trainable, layer.mlp_skip_gain)
        self.dropout = nn.Dropout(layer.dropout) if layer.dropout else Identity()

    def forward(self, x_BTC: Tensor, **context: Any) -> Tensor:
        return self.order.run(self, x_BTC, context)
