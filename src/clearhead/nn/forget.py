"""Forget gates (FoX, arXiv 2503.02130): scores fade with the gates of the tokens between."""

import torch
from torch import Tensor, nn

from clearhead import ops
from clearhead.nn.alibi import Alibi, bias_refuses, column_flops
from clearhead.nn.bases import NoPosition, PositionTables
from clearhead.ops.visibility import Visibility
from clearhead.spec import Declaration, LayerSpec


class ForgetGates(nn.Module):
    """log f = log σ(x w + b), a gate for each token and head; w as any matrix, b from 0.

    Log gates are cached beside their keys and summed when these are read, so a cache may drop early
    keys. Heads that share a key have a gate each; the maps of a head one.
    """

    def __init__(self, layer: LayerSpec, heads: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(layer.hidden_size, heads)
        self.scale = layer.head_dim**-0.5
        self.sharing = layer.num_attention_heads // layer.num_key_value_heads
        self.together = layer.num_attention_heads // heads

    def with_gates(self, k_BGTD: Tensor, x_BTC: Tensor) -> Tensor:
        """Keys with the log gates of the heads that read them, [B, G, T, D + H / G]."""
        logits_BTH = self.gate_proj(x_BTC)
        exact = torch.promote_types(logits_BTH.dtype, torch.float32)
        log_gates_BTH = nn.functional.logsigmoid(logits_BTH.to(exact))
        by_key = log_gates_BTH.unflatten(-1, (-1, self.sharing)).transpose(1, 2)
        by_key = by_key.repeat_interleave(self.together, 1)
        return torch.cat([k_BGTD, by_key.to(k_BGTD.dtype)], -1)

    def columns(
        self, k_BGSN: Tensor, queries: int, visibility: Visibility
    ) -> tuple[Tensor, PositionTables]:
        """Keys without their gates, and the columns that `Forget.prepare` joins to both."""
        k, log_gates = k_BGSN[..., : -self.sharing], k_BGSN[..., -self.sharing :]
        if visibility.key_mask is not None:  # of padding a gate may be any number
            log_gates = log_gates.masked_fill(~visibility.key_mask[:, None, :, None], 0)
        log_gates = log_gates[:, :: self.together]
        return k, PositionTables(*ops.forget_columns(log_gates, queries, self.scale, k.dtype))


class Forget(NoPosition):
    """Scores get Σ log f_l over the tokens l after the key, up to the query: c_i − c_j.

    f = exp(−slope) is ALiBi. There is no other position, as in the paper; padding lowers no score.
    """

    cache_unrotated = staticmethod(Alibi.cache_unrotated)
    decay = ForgetGates
    prepare = staticmethod(ops.with_columns)


def _refuses(layer: LayerSpec) -> str | None:
    if layer.normalizer == "key-value":
        return "no token has a gate before the text: choose normalizer='sink', or position='alibi'"
    return bias_refuses(layer)


def _flops(layer: LayerSpec, length: int) -> float:
    parts = 3 * (1 + layer.num_attention_heads // layer.num_key_value_heads)
    return column_flops(parts + -parts % 8, layer, length)


DECLARATIONS = (
    Declaration(
        "position",
        "forget",
        "scores plus Σ log f over the tokens since the key, f a gate from each token; causal",
        "arXiv 2503.02130 (FoX)",
        Forget,
        refuses=_refuses,
        flops=_flops,
        cache=lambda layer: layer.num_attention_heads,
    ),
)
