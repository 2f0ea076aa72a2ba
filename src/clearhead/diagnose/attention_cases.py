"""The ways in which a few texts are given to a model: alone, padded, packed, through a cache.

Each gives every text the logits that it has alone, [T, V], and the loss of all texts their
gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from clearhead.models.base_model import CACHE, ClearheadModel, cache_of

Way = Callable[[Any, list[Tensor]], list[Tensor]]


def _plain(model: Any, texts: list[Tensor]) -> list[Tensor]:
    return [logits_of(model, ids[None])[0] for ids in texts]


def _padded(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """All texts in one batch: of a causal model all but the second are padded before they begin."""
    causal, longest = is_causal(model), max(map(len, texts))
    ids_BT = torch.zeros(len(texts), longest, dtype=torch.int64, device=texts[0].device)
    mask_BT, places = torch.zeros_like(ids_BT), []
    for row, ids in enumerate(texts):
        first = longest - len(ids) if causal and row != 1 else 0
        places.append(slice(first, first + len(ids)))
        ids_BT[row, places[row]], mask_BT[row, places[row]] = ids, 1
    options = {"position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0)} if causal else {}
    logits_BTV = logits_of(model, ids_BT, attention_mask=mask_BT, **options)
    return [logits_BTV[row, place] for row, place in enumerate(places)]


def _packed(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """All texts in one row, separated by positions that begin anew."""
    options = {"position_ids": torch.cat([torch.arange(len(ids)) for ids in texts])}
    if is_ours(model):
        options = {"document_ids": torch.cat([torch.full_like(x, n) for n, x in enumerate(texts)])}
    options = {name: one[None].to(model.device) for name, one in options.items()}
    return list(logits_of(model, torch.cat(texts)[None], **options)[0].split([*map(len, texts)]))


def _stepwise(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """Each text token by token through a cache, after half of it at once; no gradients."""
    with torch.no_grad():
        return [
            _cached(model, ids.tensor_split([*range(len(ids) // 2, len(ids))])) for ids in texts
        ]


def _in_chunks(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """Each text in three chunks through a cache, so that queries are fewer than keys."""
    return [_cached(model, ids.tensor_split((4, 7))) for ids in texts]


def _cached(model: Any, chunks: Sequence[Tensor]) -> Tensor:
    cache, logits = None, []
    for ids in filter(len, chunks):
        options: dict[str, Any] = {} if cache is None else {CACHE: cache}
        out = model(input_ids=ids[None], use_cache=True, **options)
        cache = cache_of(out)
        logits.append(out.logits[0])
    return torch.cat(logits)


def logits_of(model: Any, ids_BT: Tensor, **options: Any) -> Tensor:
    """[B, T, V], without a cache."""
    cached = {"use_cache": False} if is_causal(model) else {}
    logits_BTV: Tensor = model(input_ids=ids_BT, **cached, **options).logits
    return logits_BTV


# By the name of the case: "sinks of 20" and "windowed" are of models that have such parts.
WAYS: dict[str, Way] = {
    **{"plain": _plain, "sinks of 20": _plain, "padded": _padded, "packed": _packed},
    **{"cached": _stepwise, "chunks": _in_chunks, "windowed": _plain},
    "windowed, cached": _stepwise,
}
OF_CAUSAL = ("packed", "cached", "chunks", "windowed, cached")


class Answer(NamedTuple):
    """Logits of each text, float64 [T, V], and the gradients of the mean cross-entropy of all next
    tokens (an encoder's own) by parameter; none where none were taken."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]

    def errors(self, exact: "Answer") -> tuple[float, dict[str, float]]:
        """‖error‖ / ‖exact‖ of the logits, and of each parameter's gradient.

        A gradient that is all but nothing, such as that of a key's bias, is measured by a
        thousandth of the largest: its own size is rounding.
        """
        whole, right = torch.cat(self.logits), torch.cat(exact.logits)
        output = (whole - right).norm().item() / right.norm().item()
        if not self.gradients:
            return output, {}
        least = 1e-3 * max(one.norm().item() for one in exact.gradients.values())
        zero = torch.zeros(())
        return output, {
            name: (self.gradients.get(name, zero) - one).norm().item()
            / max(one.norm().item(), least)
            for name, one in exact.gradients.items()
        }


def answer_of(model: Any, texts: list[Tensor], way: str) -> Answer:
    """Give a model the texts in one way."""
    logits = [one.double() for one in WAYS[way](model, texts)]
    causal = int(is_causal(model))  # the last token foretells none
    predicted = torch.cat([one[: len(one) - causal] for one in logits])
    loss = cross_entropy(predicted, torch.cat([ids[causal:] for ids in texts]))
    gradients: dict[str, Tensor] = {}
    if loss.requires_grad:
        named = {name: one for name, one in model.named_parameters() if one.requires_grad}
        grads = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        zipped = zip(named, grads, strict=True)
        gradients = {name: grad.double() for name, grad in zipped if grad is not None}
    return Answer([one.detach() for one in logits], gradients)


def drawn_texts(model: Any, lengths: Sequence[int]) -> list[Tensor]:
    """Random tokens, int64 [T], a text of each length, or of as many as the model has positions."""
    draw = torch.Generator().manual_seed(0)
    known = model.get_input_embeddings().num_embeddings
    limit = getattr(model.config, "max_position_embeddings", None) or max(lengths)
    texts = (torch.randint(1, known, (min(n, limit),), generator=draw) for n in lengths)
    return [ids.to(model.device) for ids in texts]


def is_causal(model: Any) -> bool:
    """True of a model that predicts the next token, False of one for hidden tokens."""
    if is_ours(model):
        return bool(model.config.direction == "causal")
    return "ForMaskedLM" not in type(model).__name__


def is_ours(model: Any) -> bool:
    """True of clearhead's own models."""
    return isinstance(getattr(model, "model", None), ClearheadModel)
