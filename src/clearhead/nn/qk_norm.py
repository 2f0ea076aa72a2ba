"""Norms of queries and keys, head by head, before position is put into them."""

from clearhead.nn.identity import Identity
from clearhead.nn.norms import RMSNorm
from clearhead.spec import Declaration, LayerSpec


def _refuses(layer: LayerSpec) -> str | None:
    from_zero = layer.shaping in ("shaped", "skipinit")
    if layer.query_range == 0 or (layer.query_range is None and from_zero):
        return (
            "beside W_Q = 0 it would multiply the gradient of W_Q by 1/eps: choose "
            "qk_norm='none', or a query_range above 0"
        )
    if layer.scores != "dot":
        return (
            f"scores={layer.scores!r} read lengths of queries and keys, which it takes out: choose "
            "scores='dot'"
        )
    return None


NONE = Declaration(
    axis="qk_norm",
    name="none",
    summary="queries and keys as projected",
    source="arXiv 1706.03762",
    build=lambda layer, width: Identity(),
)
RMSNORM = Declaration(
    axis="qk_norm",
    name="rmsnorm",
    summary="each head's queries and keys by root mean square, one gain a channel for all heads",
    source="arXiv 2010.04245, as Qwen3 has it",
    build=lambda layer, width: RMSNorm(width, layer.norm_eps),
    refuses=_refuses,
    flops=lambda layer, length: (
        4.0 * (layer.num_attention_heads + layer.num_key_value_heads) * layer.head_dim
    ),
)
