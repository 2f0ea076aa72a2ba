"""Packed texts without padding, the input of variable-length kernels; kept for each mask."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Rows and places in their rows, int64 [N] each.
Places = tuple[Tensor, Tensor]
# Hidden tokens are texts of at most so many, which cost little, so that no token is moved.
HIDDEN = 128


class Packing(NamedTuple):
    """Tokens of texts, in the order of [B, T] queries and [B, S] keys.

    A text is one row's part of one document; hidden tokens belong to no text, or to texts of their
    own. A text's queries are the last of its keys.
    """

    of_queries: Places | None  # of the tokens; None for all, in order
    of_keys: Places | None
    places_q: Places  # each query's text, and its index in it
    ends_q: Tensor  # cumulative lengths of the texts, int32, from 0
    ends_k: Tensor
    longest_q: int  # tokens of the longest text
    longest_k: int
    gapless: bool  # each text's tokens are neighbours in their row, as a window counts them


# Of a mask, by identity: what it was found from, and the packing.
_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packing(key_mask: Tensor | None, segments: Tensor | None, queries: int) -> Packing:
    """Pack rows whose queries are their last `queries` keys; a mask or segments must be given."""
    mask, other = (segments, key_mask) if key_mask is None else (key_mask, segments)
    assert mask is not None
    if mask.is_inference() or (other is not None and other.is_inference()):
        return _pack(key_mask, segments, queries)  # nothing tells when such a mask is written to
    state = (mask._version, None if other is None else other._version, queries)
    entry = _KEPT.get(mask)
    if entry is None or entry[0] != state or entry[1]() is not other:
        reference = weakref.ref(other) if other is not None else lambda: None
        entry = _KEPT[mask] = (state, reference, _pack(key_mask, segments, queries))
    packed: Packing = entry[2]
    return packed


def _pack(key_mask: Tensor | None, segments: Tensor | None, queries: int) -> Packing:
    if key_mask is None:
        assert segments is not None
        return _sort(segments.long(), None, queries)
    document = torch.zeros_like(key_mask, dtype=torch.int64) if segments is None else segments
    # Hidden tokens that lie apart are texts apart.
    block = torch.arange(key_mask.shape[1], device=key_mask.device) // HIDDEN
    other = document.amax() + 1 + key_mask.cumsum(1) * (len(block) // HIDDEN + 1) + block
    texts = _sort(torch.where(key_mask, document, other), None, queries)
    if texts.of_keys is None:
        return texts
    return _sort(document.long(), key_mask, queries)


def _sort(document: Tensor, key_mask: Tensor | None, queries: int) -> Packing:
    """Texts ordered by their first token, without hidden tokens."""
    batch, keys = document.shape
    place, document = torch.arange(batch * keys, device=document.device), document.flatten()
    if key_mask is not None:
        place, document = place[key_mask.flatten()], document[key_mask.flatten()]
    _, document = document.unique(return_inverse=True)
    _, text = (place // keys * (len(document) + 1) + document).unique(return_inverse=True)
    first = torch.full_like(place, batch * keys).scatter_reduce(0, text, place, "amin")
    _, text = first[text].unique(return_inverse=True)
    text, order = text.sort(stable=True)
    place = place[order]
    texts = int(text[-1]) + 1 if len(text) else 0
    row, column = place // keys, place % keys - (keys - queries)  # among the row's queries
    asks = column >= 0
    ends_k, ends_q = (_ends(part, texts) for part in (text, text[asks]))
    number = torch.arange(len(text[asks]), device=text.device)
    return Packing(
        _unless_whole(row[asks], column[asks], queries, batch),
        _unless_whole(row, place % keys, keys, batch),
        (text[asks], number - ends_q[text[asks]]),
        *(ends_q, ends_k, int(ends_q.diff().max()), int(ends_k.diff().max())),
        bool(((place.diff() == 1) | (text.diff() != 0)).all()),
    )


def _ends(text: Tensor, texts: int) -> Tensor:
    """Cumulative lengths; one empty text where there is none."""
    lengths = torch.bincount(text, minlength=max(texts, 1))
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _unless_whole(row: Tensor, column: Tensor, length: int, batch: int) -> Places | None:
    whole = len(row) == batch * length and bool(((row * length + column).diff() == 1).all())
    return None if whole else (row, column)
