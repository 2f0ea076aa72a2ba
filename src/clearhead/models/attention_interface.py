"""Values of `attn_implementation`: sdpa, eager, or a function of transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clearhead.errors import ClearheadError
from clearhead.nn.bases import Interface
from clearhead.ops import oracles
from clearhead.ops.attention import at_zero_queries


def _sdpa(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    del options["lambdas"]
    return module.attend(q, k, v, scale=scaling, **options).transpose(1, 2), None


def _eager(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    scaling: float,
    maps: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The oracle; a layer's matrix is put into `maps` where they are given."""
    lambdas = options.pop("lambdas")
    options |= options.pop("visibility")._asdict() | {"scale": scaling}

    def alone() -> Tensor:
        resting = options | {"sink": at_zero_queries(options["sink"])}
        return oracles.weights(torch.zeros_like(q), torch.zeros_like(k), **resting)

    if maps is not None:
        weights = module.weights(q, k, **options)[..., -k.shape[2] :]
        matrix = module.effective_weights(weights, lambdas, alone, k.shape[2] - q.shape[2])
        maps.append(matrix.to(q.dtype))
    out = oracles.attend(q, k, v, by=module.weights, **options).to(v.dtype)
    return out.transpose(1, 2), None


# Called as transformers calls those of its AttentionInterface.
OWN: dict[str, Callable[..., Any]] = {"sdpa": _sdpa, "eager": _eager}


def interface_of(implementation: str, maps: list[Tensor] | None) -> Interface:
    """The function that `attn_implementation` puts in place of `Attention.attend`.

    One registered with transformers' AttentionInterface is called as transformers does. It also
    gets clearhead's arguments: sink and prefix (see `ops.attend`), visibility, the keys that each
    query sees (`ops.visibility`), and lambdas, by which `module.maps.effective_weights`
    combines the maps. For differential attention V1 it gets all first maps and then all second,
    with values of twice the width; for V2 the two maps of a head in turn.

    Args:
        maps: list to which each layer's matrix is appended; refused unless "eager".
    """
    if maps is not None and implementation != "eager":
        raise ClearheadError(
            "output_attentions needs attn_implementation='eager'; "
            f"found {implementation!r}: call model.set_attn_implementation('eager')"
        )
    if implementation.startswith("paged|"):  # it knows neither sinks nor windows
        raise ClearheadError(
            f"{implementation!r} is for continuous batching, which clearhead's own classes do not "
            "support: call model.set_attn_implementation('sdpa')"
        )
    function = OWN.get(implementation) or ALL_ATTENTION_FUNCTIONS[implementation]
    if maps is not None:
        function = partial(_eager, maps=maps)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        out, _ = function(module, q, k, v, None, scaling=options.pop("scale"), **options)
        return out.transpose(1, 2)

    return attend
