"""The first token's share of attention, head by head, as the logit of a learned sink."""

from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.data.sources import passages
from clearhead.errors import ClearheadError
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.nn.softmax1 import NOTHING
from clearhead.probe import AttentionCall, measure
from clearhead.terminal import say

_CHARACTERS = 16  # of a document that are read for each token asked for
_HALVINGS = 60  # from 200 to below float64's resolution of a logit


def sample(
    text: str, tokenizer: Any, *, length: int, count: int, least: Literal[1, 2] = 1
) -> list[Tensor]:
    """Windows of tokens, int64 [length] each: the middle of each document, then what is around it.

    Args:
        text: a source, as `--data.data` names them, or a text itself.
        least: windows without which the text is refused.

    Raises:
        ClearheadError: no such source, or less text than `least` windows.
    """
    found: list[tuple[int, int, Tensor]] = []
    tokens, documents, wanted = 0, 0, _CHARACTERS * length * count
    for document in passages(text, say):
        start = max(0, (len(document) - wanted) // 2)
        ids = tokenizer(
            document[start : start + wanted],
            add_special_tokens=False,
            split_special_tokens=True,  # as in training, a text yields no special token
            verbose=False,
        ).input_ids
        tokens = max(tokens, len(ids))
        pieces = torch.tensor(ids, dtype=torch.int64).split(length)
        whole = [piece for piece in pieces if len(piece) == length]
        middle = len(whole) // 2
        found += [(abs(at - middle), documents, piece) for at, piece in enumerate(whole)]
        documents += bool(whole)
        if documents == count:
            break
    if len(found) < least:
        needed = "a window" if least == 1 else "two windows"
        raise ClearheadError(
            f"the longest document of {text} has {tokens:,} tokens, too few for {needed} of "
            f"{length}: give more text, or a smaller --length"
        )
    found.sort(key=lambda entry: entry[:2])
    return [piece for _, _, piece in found[:count]]


class _Rows:
    """The first token's weight, and the log-sum-exp of all logits, by layer: [H, rows] each.

    The first query sees one token alone, which says nothing.
    """

    def __init__(self, layers: int) -> None:
        self.shares = [list[Tensor]() for _ in range(layers)]
        self.totals = [list[Tensor]() for _ in range(layers)]

    def observe(self, call: AttentionCall) -> None:
        for tile in call.scores():
            score_BHRS = tile.scores.masked_fill(~tile.visible, -torch.inf)
            score_BHRS = score_BHRS[:, :, tile.start == 0 :]
            total_BHR = score_BHRS.logsumexp(-1)
            share_BHR = (score_BHRS[..., 0] - total_BHR).exp()
            for rows, found in ((self.shares, share_BHR), (self.totals, total_BHR)):
                rows[call.layer].append(found.transpose(0, 1).flatten(1).double().cpu())

    def measures(self) -> list[dict[str, Any]]:
        return []


def calibrate(
    model: ClearheadForCausalLM, windows: Iterable[Tensor], layers: Collection[int]
) -> None:
    """Give learned sinks the logit at which their mean weight is the first token's; no training.

    Args:
        layers: layers whose sinks (`normalizer="sink"`) are set; until then the logits are too low
            to have an effect.
    """
    blocks: Any = model.model.layers
    for layer in layers:
        torch.nn.init.constant_(blocks[layer].self_attn.normalizer.logit, NOTHING)
    rows = _Rows(len(blocks))
    measure(model, windows, batch_size=1, attention=[rows])
    for layer in layers:
        share_H = torch.cat(rows.shares[layer], 1).mean(1)
        logits = _balanced(torch.cat(rows.totals[layer], 1), share_H)
        with torch.no_grad():
            blocks[layer].self_attn.normalizer.logit.copy_(logits)


def _balanced(totals_HN: Tensor, shares_H: Tensor) -> Tensor:
    """The logit b of each head at which σ(b − total) has this mean; rows that see nothing are left
    out."""
    seen_HN = totals_HN.isfinite()
    low, high = (torch.full_like(shares_H, edge) for edge in (-100.0, 100.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        weight_HN = torch.sigmoid(middle[:, None] - totals_HN).where(seen_HN, 0)
        less = weight_HN.sum(1) / seen_HN.sum(1) < shares_H
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return (low + high) / 2
