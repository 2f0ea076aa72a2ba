"""Keys and values in few bits, as a cache would hold them.

They are rounded where attention reads them, by the cache's own scales: a token's do not depend on
others, a channel's and a tensor's are of all tokens of a text so far.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, cat, nn

from clearhead.errors import ClearheadError
from clearhead.nn.attention import Attention
from clearhead.ops.hadamard import rotate_channels
from clearhead.quantize.linear import naming
from clearhead.quantize.quantizers import fp8, zeropoint
from clearhead.quantize.schemes import CacheScale, KeysValues

_SHARED: dict[CacheScale, tuple[int, ...]] = {"token": (3,), "channel": (2,), "tensor": (1, 2, 3)}


def rounded(x_BGSD: Tensor, how: KeysValues, *, keys: bool) -> Tensor:
    """Keys, or values, [B, G, S, D], quantised and dequantised; of each text by itself.

    By "channel" values have a scale for each token, since they are added up over tokens.

    Raises:
        ClearheadError: NaN or infinity.
    """
    kept, x = x_BGSD[:, :, : how.keep], x_BGSD[:, :, how.keep :]
    if not x.shape[2]:
        return x_BGSD
    dims = _SHARED["token" if how.scale == "channel" and not keys else how.scale]
    x = rotate_channels(x) if how.rotated else x
    x = fp8(x, dims) if how.bits is None else zeropoint(x, how.bits, dims)
    x = rotate_channels(x) if how.rotated else x
    return cat([kept, x], 2)


def cached_unrotated(module: nn.Module) -> bool:
    """True of attention whose cache holds keys without their positions, whatever the scheme."""
    return isinstance(module, Attention) and (module.cache_unrotated or module.decay is not None)


@contextmanager
def keys_before_rotation(model: Any, how: KeysValues) -> Iterator[None]:
    """In the body keys are rounded as `k_proj` gives them, where they are cached so.

    Raises:
        ClearheadError: keys before RoPE are to be rounded, and no layer has a `k_proj`.
    """
    hooked = 0
    with ExitStack() as stack:
        for name, module in model.named_modules():
            projection = getattr(module, "k_proj", None)
            if isinstance(projection, nn.Module) and (how.prerope or cached_unrotated(module)):
                hook = _rounding(f"{name}.k_proj", _width(module, model), how)
                stack.enter_context(projection.register_forward_hook(hook))
                hooked += 1
        if how.prerope and not hooked:
            raise ClearheadError(
                f"{type(model).__name__} has no k_proj, so its keys before RoPE are out of reach: "
                "leave -prerope out"
            )
        yield


def _width(module: Any, model: Any) -> int:
    """Numbers in a key of one head, as `k_proj` gives it."""
    if isinstance(module, Attention):
        return module.k_proj.out_features // module.groups
    config = model.config.get_text_config()
    usual = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(getattr(module, "head_dim", None) or usual)


def _rounding(name: str, width: int, how: KeysValues) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: Any, k_BTC: Tensor) -> Tensor:
        k_BGTD = k_BTC.unflatten(-1, (-1, width)).transpose(1, 2)
        with naming(f"the output of {name}"):
            return rounded(k_BGTD, how, keys=True).transpose(1, 2).flatten(2)

    return hook
