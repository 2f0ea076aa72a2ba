"""Texts one after the other, without padding: what kernels for texts of many lengths take.

The order of the tokens and the texts' ends depend on the masks alone. They are found once for the
layers of a model, which are given the same masks: kept as long as a mask lives and is not written
to.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Packing(NamedTuple):
    """Tokens of texts, in the order of [B·T] queries and [B·S] keys.

    A text is what one row has of one document; a hidden token belongs to none. The queries of a
    text are the last of its keys, as the rows' are.

    Attributes:
        of_queries, of_keys: places of the tokens, int64 [N]; None if all are taken as they come.
        ends_q, ends_k: cumulative lengths of the texts, int32, from 0.
        longest_q, longest_k: most tokens of a text.
        gapless: whether each text's tokens are neighbours in their row.
    """

    of_queries: Tensor | None
    of_keys: Tensor | None
    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int
    gapless: bool

    def serves(self, window: int | None) -> bool:
        """True where a window means the same as in the rows."""
        return window is None or self.gapless

    @staticmethod
    def places(ends: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token its text, and its place there."""
        lengths = ends.diff().long()
        text = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)
        return text, torch.arange(len(text), device=ends.device) - ends[text]


# Of a mask, by identity: what it was found from, and the packing.
_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packing(key_mask: Tensor | None, segments: Tensor | None, queries: int) -> Packing:
    """The packing of rows of which the last `queries` keys are queries; needs either mask."""
    mask, other = (segments, key_mask) if key_mask is None else (key_mask, segments)
    assert mask is not None
    if mask.is_inference() or (other is not None and other.is_inference()):
        return _pack(key_mask, segments, queries)  # nothing tells when such a mask is written to
    state = (mask._version, None if other is None else other._version, queries)
    kept = _KEPT.get(mask)
    if kept is None or kept[0] != state or kept[1]() is not other:
        reference = weakref.ref(other) if other is not None else lambda: None
        kept = _KEPT[mask] = (state, reference, _pack(key_mask, segments, queries))
    found: Packing = kept[2]
    return found


def _pack(key_mask: Tensor | None, segments: Tensor | None, queries: int) -> Packing:
    mask = segments if key_mask is None else key_mask
    assert mask is not None
    batch, keys = mask.shape
    place = torch.arange(batch * keys, device=mask.device)
    document = torch.zeros_like(place) if segments is None else segments.flatten().long()
    if key_mask is not None:
        place, document = place[key_mask.flatten()], document[key_mask.flatten()]
    row = place // keys
    _, document = document.unique(return_inverse=True)
    _, text = (row * (len(document) + 1) + document).unique(return_inverse=True)
    text, order = text.sort(stable=True)
    place, row = place[order], row[order]
    texts = int(text[-1]) + 1 if len(text) else 0
    own = place - row * keys - (keys - queries)  # among the row's queries
    asks = own >= 0
    ends_k, ends_q = (_ends(part, texts) for part in (text, text[asks]))
    return Packing(
        _unless_whole((row * queries + own)[asks], batch * queries),
        _unless_whole(place, batch * keys),
        *(ends_q, ends_k, int(ends_q.diff().max()), int(ends_k.diff().max())),
        bool(((place.diff() == 1) | (text.diff() != 0)).all()),
    )


def _ends(text: Tensor, texts: int) -> Tensor:
    """Cumulative lengths; one empty text where there is none."""
    lengths = torch.bincount(text, minlength=max(texts, 1))
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _unless_whole(places: Tensor, number: int) -> Tensor | None:
    if len(places) < number:
        return places
    return None if bool((places.diff() == 1).all()) else places
