"""Ways of running a few texts through a model: alone, padded, packed, through a cache.

A correct model gives every text the same logits, and their loss the same gradients, in each way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from clearhead.models.base_model import CACHE, ClearheadModel, cache_of

# Lengths of the texts: odd, and each longer than the window of `attention_check`.
LENGTHS = (23, 17, 9)


class Answer(NamedTuple):
    """Logits of the texts, and gradients.

    Attributes:
        logits: of each text, float64 [T, V].
        gradients: of the mean cross-entropy of all next tokens (an encoder's own), by parameter;
            empty where none were taken.
    """

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def drawn_texts(model: Any, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Random tokens, int64 [T], one text of each length, cut to the model's number of positions."""
    draw = torch.Generator().manual_seed(seed)
    known = model.get_input_embeddings().num_embeddings
    limit = getattr(model.config, "max_position_embeddings", None) or max(lengths)
    drawn = (torch.randint(1, known, (min(n, limit),), generator=draw) for n in lengths)
    return [ids.to(model.device) for ids in drawn]


def plain(model: Any, texts: list[Tensor]) -> Answer:
    """Each text alone."""
    return _answer(model, texts, [logits(model, ids[None])[0] for ids in texts])


def compiled(model: Any, texts: list[Tensor]) -> Answer:
    """Each text alone, under torch.compile."""
    compiled = torch.compile(model)
    try:
        return _answer(model, texts, [logits(compiled, ids[None])[0] for ids in texts])
    finally:
        torch.compiler.reset()


def padded(model: Any, texts: list[Tensor]) -> Answer:
    """All texts in one batch: of a causal model all but the second are padded before they begin."""
    causal = is_causal(model)
    longest = max(map(len, texts))
    ids_BT = torch.zeros(len(texts), longest, dtype=torch.int64, device=texts[0].device)
    mask_BT, places = torch.zeros_like(ids_BT), []
    for row, ids in enumerate(texts):
        first = longest - len(ids) if causal and row != 1 else 0
        places.append(slice(first, first + len(ids)))
        ids_BT[row, places[row]], mask_BT[row, places[row]] = ids, 1
    options: dict[str, Any] = {"attention_mask": mask_BT}
    if causal:
        options["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits_BTV = logits(model, ids_BT, **options)
    return _answer(model, texts, [logits_BTV[row, place] for row, place in enumerate(places)])


def packed(model: Any, texts: list[Tensor]) -> Answer:
    """All texts in one row, separated by positions that restart."""
    positions = torch.cat([torch.arange(len(ids), device=ids.device) for ids in texts])
    options = {"position_ids": positions[None]}
    if is_ours(model):
        lengths = torch.tensor([*map(len, texts)], device=positions.device)
        numbers = torch.arange(len(texts), device=positions.device)
        options = {"document_ids": numbers.repeat_interleave(lengths)[None]}
    logits_TV = logits(model, torch.cat(texts)[None], **options)[0]
    return _answer(model, texts, list(logits_TV.split([*map(len, texts)])))


def stepwise(model: Any, texts: list[Tensor]) -> Answer:
    """Each text token by token through a cache, after half of it at once; no gradients."""
    with torch.no_grad():
        every = [_through_cache(model, ids, [len(ids) // 2, *[1] * len(ids)]) for ids in texts]
    return _answer(model, texts, every)


def in_chunks(model: Any, texts: list[Tensor]) -> Answer:
    """Each text in three chunks through a cache, so that there are fewer queries than keys."""
    return _answer(model, texts, [_through_cache(model, ids, [4, 3, len(ids)]) for ids in texts])


def _through_cache(model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    options: dict[str, Any] = {}
    logits = []
    for size in sizes:
        chunk, ids = ids[:size], ids[size:]
        if len(chunk):
            out = model(input_ids=chunk[None], use_cache=True, **options)
            options = {CACHE: cache_of(out)}
            logits.append(out.logits[0])
    return torch.cat(logits)


def logits(model: Any, ids_BT: Tensor, **options: Any) -> Tensor:
    """[B, T, V], without a cache."""
    cached = {"use_cache": False} if is_causal(model) else {}
    logits: Tensor = model(input_ids=ids_BT, **cached, **options).logits
    return logits


def _answer(model: Any, texts: list[Tensor], logits: list[Tensor]) -> Answer:
    """The logits with their loss and its gradients, in float64."""
    wide, ahead = [one.double() for one in logits], int(is_causal(model))
    predicting = torch.cat([one[: len(one) - ahead] for one in wide])
    loss = cross_entropy(predicting, torch.cat([ids[ahead:] for ids in texts]))
    gradients: dict[str, Tensor] = {}
    if loss.requires_grad:
        named = {name: one for name, one in model.named_parameters() if one.requires_grad}
        grads = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        zipped = zip(named, grads, strict=True)
        gradients = {name: grad.double() for name, grad in zipped if grad is not None}
    return Answer([one.detach() for one in wide], gradients)


def is_causal(model: Any) -> bool:
    """True of a model that predicts the next token, False of one for hidden tokens."""
    if is_ours(model):
        return bool(model.config.direction == "causal")
    return "ForMaskedLM" not in type(model).__name__


def is_ours(model: Any) -> bool:
    """True of clearhead's own models."""
    return isinstance(getattr(model, "model", None), ClearheadModel)
