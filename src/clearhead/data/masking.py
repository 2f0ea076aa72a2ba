"""Deterministic masking for MLM: a pure function of (seed, batch index)."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clearhead.data.batches import IGNORED, Batches
from clearhead.data.config import SHARE
from clearhead.data.corpus import Corpus
from clearhead.data.seeded import raw_numbers
from clearhead.data.tokenizer import vocabulary_size
from clearhead.errors import ClearheadError

MASK = "<|mask|>"
"""The token that stands for a hidden one."""
_SHOWN_AS_MASK, _SHOWN_AS_ANOTHER = 0.8, 0.1  # BERT's rule; the rest is shown as it is


def with_mask_token(corpus: Corpus) -> Corpus:
    """The corpus with a tokenizer that has a mask token: its own, or `MASK` as a new entry.

    No text encodes to it, so tokens and fingerprint are unchanged.
    """
    if corpus.tokenizer.mask_token_id is not None:
        return corpus
    tokenizer = copy.deepcopy(corpus.tokenizer)
    tokenizer.add_special_tokens({"mask_token": MASK})
    size = max(corpus.vocabulary_size, vocabulary_size(tokenizer))
    return replace(corpus, tokenizer=tokenizer, vocabulary_size=size)


class Masking:
    """Hides a share of each row's ordinary tokens; special ones are never hidden.

    Of the hidden tokens 80 % are shown as the mask token, 10 % as a random ordinary token and 10 %
    as they are (arXiv 1810.04805, section 3.1). The number hidden in a row is the share of its
    ordinary tokens rounded, and at least one.

    Args:
        tokenizer: with a mask token.
        share: above 0 and below 1.

    Raises:
        ClearheadError: a tokenizer without a mask token, or another share.
    """

    def __init__(self, tokenizer: Any, share: float = SHARE) -> None:
        if tokenizer.mask_token_id is None:
            raise ClearheadError(
                "this tokenizer has no mask token: clearhead.data.with_mask_token adds one"
            )
        if not 0 < share < 1:
            raise ClearheadError(f"mask is {share}: give a share above 0 and below 1, such as 0.25")
        self.share = share
        self.mask_id: int = tokenizer.mask_token_id
        self._special = np.array(sorted(tokenizer.all_special_ids))
        known = np.array(sorted(tokenizer.get_vocab().values()))
        self._ordinary = np.setdiff1d(known, self._special)

    def __call__(self, ids_BT: np.ndarray, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Masked inputs, and the labels: −100 but where a token is hidden; int64 [B, T] both.

        `label` determines what is drawn, in every NumPy alike.
        """
        raw = raw_numbers(label, 3 * ids_BT.size).reshape(3, *ids_BT.shape)
        ordinary_BT = ~np.isin(ids_BT, self._special)
        # Ranks of random numbers; those of special tokens come last.
        order_BT = np.where(ordinary_BT, raw[0] >> 1, np.iinfo(np.uint64).max)
        rank_BT = order_BT.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        found_B = ordinary_BT.sum(axis=1)
        count_B = np.minimum(np.maximum(np.rint(self.share * found_B), 1), found_B)
        hidden_BT = rank_BT < count_B[:, None]
        fate_BT = raw[1] / 2.0**64
        shown_BT = np.where(hidden_BT & (fate_BT < _SHOWN_AS_MASK), self.mask_id, ids_BT)
        other_BT = self._ordinary[raw[2] % len(self._ordinary)]
        swapped_BT = (fate_BT >= _SHOWN_AS_MASK) & (fate_BT < _SHOWN_AS_MASK + _SHOWN_AS_ANOTHER)
        shown_BT = np.where(hidden_BT & swapped_BT, other_BT, shown_BT)
        return shown_BT, np.where(hidden_BT, ids_BT, IGNORED)


class MaskedBatches:
    """`Batches` with hidden tokens: other ones at every visit of a window, the same in every run.

    Attributes:
        objective: "mlm": labels are at the hidden tokens' own positions, not shifted.
        fingerprint: hash of the text, and the share hidden.
    """

    objective = "mlm"

    def __init__(self, batches: Batches, masking: Masking) -> None:
        self.batches = batches
        self.masking = masking
        self.begin = batches.begin
        self.fingerprint = f"{batches.fingerprint}, {masking.share} hidden"

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """As `Batches.batch`; "input_ids" as shown, "labels" only at the hidden places."""
        batch = self.batches.batch(step)
        label = f"seed {self.batches.seed}, masks of batch {step}"
        shown, labels = self.masking(batch["input_ids"].numpy(), label)
        return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}
