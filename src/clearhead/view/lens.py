"""The logit lens: a model's prediction of the next token after each layer.

The model's own final norm and output head are applied to the hidden states of every layer
(nostalgebraist, 2020). A model may do more to its logits; so the lens is checked on the last
layer, and left out if it does not give the model's own logits there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.models.inspection import backbone, decoder_layers

BEST = 4  # predictions shown of each token and layer
_ROWS = 128  # tokens whose logits are held at once
_CLOSE = 0.02  # of a probability: a lens further off is not this model's


@dataclass
class Lens:
    """Predictions from hidden states.

    Attributes:
        norm, head: the model's own.
        tokens, shares: layer → [T, BEST], the likeliest next tokens and their probabilities.
    """

    norm: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    tokens: dict[int, Tensor] = field(default_factory=dict)
    shares: dict[int, Tensor] = field(default_factory=dict)

    def read(self, layer: int, x_TC: Tensor) -> None:
        """Add the predictions after one layer."""
        best = [_best(self._logits(rows)) for rows in x_TC.split(_ROWS)]
        self.shares[layer] = torch.cat([shares for shares, _ in best]).cpu()
        self.tokens[layer] = torch.cat([tokens for _, tokens in best]).cpu()

    def _logits(self, x_TC: Tensor) -> Tensor:
        # A stream in float32 has a head of the weights' dtype (Mamba in bfloat16).
        weight = getattr(self.head, "weight", None)
        normed = self.norm(x_TC)
        return self.head(normed if weight is None else normed.to(weight.dtype))

    def agrees(self, logits_TV: Tensor) -> bool:
        """True if its prediction after the last layer is the model's own."""
        found = self.shares[max(self.shares)].split(_ROWS)
        return all(
            bool(((_best(rows)[0].cpu() - shares).abs() < _CLOSE).all())
            for rows, shares in zip(logits_TV.split(_ROWS), found, strict=True)
        )


def find_lens(model: Any, ids_BT: Tensor) -> Lens | None:
    """The norm and the head behind the last layer of a causal language model; None without a head.

    The norm is the module of the backbone that is given the last layer's output.

    Args:
        ids_BT: any text; it is run once.
    """
    head = model.get_output_embeddings()
    vocabulary = getattr(model.config, "vocab_size", 0)
    if head is None or vocabulary < BEST:
        return None
    last = decoder_layers(model)[-1]
    inside = set(last.modules())
    output: list[Tensor] = []
    norms: list[nn.Module] = []

    def left(module: nn.Module, arguments: Any, result: Any) -> None:
        output.append(result[0] if isinstance(result, tuple) else result)

    def normed(module: nn.Module, arguments: Any, result: Any) -> None:
        given = bool(output and arguments) and arguments[0] is output[-1]
        # A pooler is given it, too, and makes one vector of it.
        if given and isinstance(result, Tensor) and result.shape == output[-1].shape:
            norms.append(module)

    handles = [last.register_forward_hook(left)]
    handles += [
        module.register_forward_hook(normed)
        for module in backbone(model).modules()
        if module not in inside
    ]
    try:
        model(input_ids=ids_BT)
    finally:
        for handle in handles:
            handle.remove()
    return Lens(norms[0] if norms else nn.Identity(), head)


def _best(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The BEST largest probabilities of each row, and their tokens."""
    logits = logits_TV.float()
    top = logits.topk(BEST)
    return torch.exp(top.values - logits.logsumexp(-1, keepdim=True)), top.indices


def surprises(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """−log₂ p of each token after those before it, [T − 1]."""
    found = [
        torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="none")
        for rows, wanted in zip(logits_TV[:-1].split(_ROWS), ids_T[1:].split(_ROWS), strict=True)
    ]
    return torch.cat(found).cpu() / torch.log(torch.tensor(2.0))
