"""Values of `attn_implementation`: sdpa, eager, or a function of transformers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead.nn.protocols import Attend
from clearhead.ops import oracles
from clearhead.ops.attention import attend_visible


def stock_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, /, *, lambdas: Any, **options: Any
) -> Tensor:
    """`ops.attend`, called as a layer does."""
    return attend_visible(q, k, v, **options)


def _eager(
    module: Any, q: Tensor, k: Tensor, v: Tensor, /, *, lambdas: Any, **options: Any
) -> Tensor:
    options |= options.pop("visibility")._asdict()
    return oracles.attend(q, k, v, **options).to(v.dtype)


# A kernel of `ops` may take the place of the call and of what follows it.
stock_attention.fuses = True  # type: ignore[attr-defined]

IMPLEMENTATIONS: dict[str, Attend] = {"sdpa": stock_attention, "eager": _eager}


def through_interface(function: Callable[..., Any]) -> Attend:
    """A function registered with transformers' AttentionInterface, called as transformers does.

    It gets ours beside the usual arguments: sink and prefix (see `ops.attend`), visibility, the
    keys that each query sees (`ops.visibility`), and lambdas, by which
    `module.maps.effective_weights` combines the maps. For differential attention V1 it gets all
    first maps and then all second, with values of twice the width; for V2 the two maps of a head in
    turn.
    """

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        out, _ = function(module, q, k, v, None, scaling=options.pop("scale"), **options)
        return out.transpose(1, 2)

    return attend
