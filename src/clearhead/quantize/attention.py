"""Attention with quantised logits, keys and values, in any model with an attention interface.

Logits are the softmax's input: scaled, capped and biased, as in Figure 8 of arXiv 2410.05258.
Hidden keys and a sink's constant logit do not count for a scale. In differential attention each
map's heads are quantised separately. A token's scale of keys and values does not depend on other
tokens, a channel's or a tensor's is over all tokens of the text so far, as in a cache.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, cat, nn

from clearhead.errors import ClearheadError
from clearhead.nn.attention import Attention
from clearhead.ops.hadamard import rotate_channels
from clearhead.probe.attention_call import AttentionCall, Scores, normalised
from clearhead.probe.observation import overridden
from clearhead.quantize.linear import naming, quantise
from clearhead.quantize.schemes import Rounding

_SHARED = {"token": (3,), "channel": (2,), "tensor": (1, 2, 3)}


def rounded(x_BGSD: Tensor, how: Rounding, *, keys: bool) -> Tensor:
    """Keys or values, quantised and dequantised, each text by itself. With scale "channel", values
    get a scale for each token, since they are summed over tokens."""
    kept, x = x_BGSD[:, :, : how.keep], x_BGSD[:, :, how.keep :]
    if not x.shape[2]:
        return x_BGSD
    dims = _SHARED["token" if how.scale == "channel" and not keys else how.scale]
    x = rotate_channels(x) if how.rotated else x
    x = quantise(x, how, dims)
    x = rotate_channels(x) if how.rotated else x
    return cat([kept, x], 2)


@contextmanager
def attention(
    model: Any, logits: Rounding | None, keys_values: Rounding | None = None
) -> Iterator[set[str]]:
    """While the body runs, quantise the logits, or keys and values, of every attention of `model`;
    yield the names of the attention modules that have run so far."""
    names, called = {module: name for name, module in model.named_modules()}, set[str]()
    early = [] if keys_values is None else _rounded_early(model, keys_values)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, describe: Any, plain: Any
    ) -> Any:
        name = names.get(module, type(module).__name__)
        called.add(name)
        if keys_values is not None:
            if not (keys_values.prerope or module in early):
                with naming(f"the keys of {name}"):
                    key = rounded(key, keys_values, keys=True)
            with naming(f"the values of {name}"):
                value = rounded(value, keys_values, keys=False)
        if logits is None:
            return plain(query, key, value)
        with naming(f"the logits of {name}"):
            return attended(describe(0, key), value, logits).transpose(1, 2).contiguous(), None

    def round_keys(name: str, width: int, _module: Any, _inputs: Any, k_BTC: Tensor) -> Tensor:
        assert keys_values is not None
        k_BGTD = k_BTC.unflatten(-1, (-1, width)).transpose(1, 2)
        with naming(f"the output of {name}.k_proj"):
            return rounded(k_BGTD, keys_values, keys=True).transpose(1, 2).flatten(2)

    with ExitStack() as stack:
        for module in early:
            hook = partial(round_keys, names[module], _width(module, model))
            stack.enter_context(module.k_proj.register_forward_hook(hook))
        stack.enter_context(overridden(model, attend, refusal=without_interface(model)))
        yield called


def _rounded_early(model: Any, how: Rounding) -> list[Any]:
    """The modules whose keys are rounded as `k_proj` gives them: all under `prerope`, else those
    that cache keys without their positions."""
    early = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "k_proj", None), nn.Module)
        if how.prerope
        or (isinstance(module, Attention) and (module.cache_unrotated or module.decay is not None))
    ]
    if how.prerope and not early:
        raise ClearheadError(
            f"{type(model).__name__} has no k_proj, so its keys before RoPE are out of reach: "
            "leave -prerope out"
        )
    return early


def _width(module: Any, model: Any) -> int:
    """Numbers in a key of one head, as `k_proj` gives it."""
    if isinstance(module, Attention):
        return module.k_proj.out_features // module.groups
    config = model.config.get_text_config()
    usual = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(getattr(module, "head_dim", None) or usual)


def without_interface(model: Any) -> str:
    """The error message for a model whose attention cannot be quantised."""
    return (
        f"{type(model).__name__} does not use transformers' AttentionInterface, so its attention "
        "logits, keys and values cannot be quantised; the other schemes work"
    )


def attended(call: AttentionCall, v_BGSV: Tensor, how: Rounding) -> Tensor:
    """Attention of `call` with quantised logits, by tiles: [B, H, T, V] in the dtype of v."""
    top = None
    if how.scale != "row":  # a scale is of one text, not of a batch: [B, 1 or H, 1, 1]
        tops = [_shown(tile).abs().amax((2, 3), keepdim=True) for tile in call.scores()]
        top = torch.stack(tops).amax(0)
        top = top.amax(1, keepdim=True) if how.scale == "tensor" else top
    out = torch.empty(*call.q.shape[:3], v_BGSV.shape[3], dtype=v_BGSV.dtype, device=call.q.device)
    v = v_BGSV.repeat_interleave(call.q.shape[1] // v_BGSV.shape[1], dim=1)
    for tile in call.scores():
        few = quantise(_shown(tile), how, (3,), top)
        logits, sink = call.competing(few, tile.visible, tile.start)
        weights, null = normalised(logits.masked_fill(~tile.visible, -torch.inf), sink)
        rows = weights @ v[:, :, : weights.shape[3]].to(weights.dtype)
        place = slice(tile.start, tile.start + weights.shape[2])
        if null is not None and call.sink_value is not None:
            rows = rows + null[..., None] * call.sink_value[:, :, place]
        out[:, :, place] = rows.to(out.dtype)
    return out


def _shown(tile: Scores) -> Tensor:
    return tile.scores.masked_fill(~tile.visible, 0.0)
