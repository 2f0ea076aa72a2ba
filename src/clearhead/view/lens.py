"""The logit lens: a model's prediction of the next token after each layer.

The model's own final norm and output head are applied to the hidden states of every layer
(nostalgebraist, 2020). A model may do more to its logits; so the lens is checked on the last
layer, and left out if it does not give the model's own logits there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.models.inspection import decoder_layers
from clearhead.probe.observation import Statistic

BEST = 4  # predictions shown of each token and layer
_CLOSE = 0.02  # of a probability: a lens further off is not this model's


class Lens(Statistic):
    """Predictions from hidden states.

    Attributes:
        norm, head: the model's own.
        tokens, shares: layer → [T, BEST], the likeliest next tokens and their probabilities.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor]) -> None:
        self.norm, self.head = norm, head
        self.tokens: dict[int, Tensor] = {}
        self.shares: dict[int, Tensor] = {}

    def observe(self, layer: int, x_BTC: Tensor) -> None:
        """Add the predictions after one layer, of the first text of the batch."""
        # A stream in float32 has a head of the weights' dtype (Mamba in bfloat16).
        weight = getattr(self.head, "weight", None)
        normed = self.norm(x_BTC[0])
        logits_TV = self.head(normed if weight is None else normed.to(weight.dtype))
        self.shares[layer], self.tokens[layer] = _best(logits_TV)

    def agrees(self, logits_TV: Tensor) -> bool:
        """True if its prediction after the last layer is the model's own."""
        shares, _ = _best(logits_TV)
        return bool(((shares - self.shares[max(self.shares)]).abs() < _CLOSE).all())


def find_lens(model: Any, ids_BT: Tensor) -> Lens | None:
    """The final norm and output head of a causal language model; None without a head.

    The norm is the module of the backbone whose input is the last layer's output.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(model.config, "vocab_size", 0) < BEST:
        return None
    last = decoder_layers(model)[-1]
    output: list[Tensor] = []
    norms: list[nn.Module] = []

    def watch(module: nn.Module, arguments: Any, result: Any) -> None:
        if module is last:
            output.append(result[0] if isinstance(result, tuple) else result)
        # A pooler is given it, too, and makes one vector of it.
        elif output and arguments and arguments[0] is output[-1] and isinstance(result, Tensor):
            norms.extend([module] * (result.shape == output[-1].shape))

    others = {*model.base_model.modules()} - {*last.modules()}
    handles = [module.register_forward_hook(watch) for module in (last, *others)]
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
    return torch.exp(top.values - logits.logsumexp(-1, keepdim=True)).cpu(), top.indices.cpu()


def surprises(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """−log₂ p of each token after those before it, [T − 1]."""
    nats = nn.functional.cross_entropy(logits_TV[:-1].float(), ids_T[1:], reduction="none")
    return nats.cpu() / torch.log(torch.tensor(2.0))
