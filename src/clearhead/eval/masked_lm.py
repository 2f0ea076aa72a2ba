"""Loss and accuracy of masked language models at hidden tokens, on windows of any length."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from clearhead.data import Corpus, Masking, windows, with_mask_token
from clearhead.data.batches import IGNORED, document_inputs, document_starts
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.eval.options import MaskedOptions
from clearhead.measure.sweep import Cell, Subject
from clearhead.models.inspection import batches, evaluating, lack_of_positions
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line

BATCH = 4096  # tokens run together


class MaskedTask(MaskedOptions):
    drawn = False
    headlines = ("masked_loss", "masked_accuracy")

    def cells(self, subject: Subject) -> list[Cell]:
        if subject.texts.splits != ("validation",):
            raise ClearheadError("masked reads the held-out documents only: leave split out")
        corpus = subject.texts.corpus  # read here, so that the cells are those of this text
        for length in subject.lengths:
            if reason := _unread(subject.model, corpus, length):
                raise ClearheadError(f"{reason}: give shorter lengths, or more text")
        return [{"length": length} for length in subject.lengths]

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        corpus, length = with_mask_token(subject.texts.corpus), cell["length"]
        loss, accuracy = masked_loss(subject.model, corpus, length=length, tokens=subject.tokens)
        read = {"predicted_tokens": loss.get("predicted_tokens", 0), "reason": loss.get("reason")}
        return lines_of(
            self.headlines, masked_loss=loss["value"], masked_accuracy=accuracy["value"], **read
        )


def masked_loss(
    model: Any, corpus: Corpus, *, length: int, tokens: int, documents_apart: bool = False
) -> list[dict[str, Any]]:
    """Loss and accuracy at hidden tokens of the validation text, the same places for every model.

    Not a perplexity: each token is predicted from the others of its window that are shown, those
    after it too, so it compares with no causal model's.

    Args:
        corpus: with a mask token (`clearhead.data.with_mask_token`).
        length: tokens of a window.
        tokens: validation tokens read, or what there is.
        documents_apart: True reads windows as training with document masks does: no document sees
            another, and positions begin again in each.

    Returns:
        Payloads of "measure" records: "masked loss" (nats a hidden token) and "masked accuracy";
        the value None with a "reason" where the model or the text is too short.
    """
    loss, right, count = 0.0, 0, 0
    reason = _unread(model, corpus, length)
    texts = () if reason else windows(corpus, length=length, count=max(1, tokens // length))
    masking = Masking(corpus.tokenizer, SHARE)
    with evaluating(model):
        for number, ids_BT in enumerate(
            batches(model, texts, max(1, BATCH // length)) if texts else ()
        ):
            made = masking(ids_BT.cpu().numpy(), f"validation, masks of batch {number}")
            shown_BT, labels_BT = (torch.from_numpy(array).to(ids_BT.device) for array in made)
            hidden_BT = labels_BT != IGNORED
            inputs = {"input_ids": shown_BT}
            if documents_apart:
                inputs |= document_inputs(ids_BT, document_starts(ids_BT, corpus.tokenizer))
                del inputs["labels"]
            logits_NV = model(**inputs).logits[hidden_BT].float()
            target_N = labels_BT[hidden_BT]
            loss += float(F.cross_entropy(logits_NV, target_N, reduction="none").double().sum())
            right += int((logits_NV.argmax(-1) == target_N).sum())
            count += len(target_N)
    line: dict[str, Any] = {"split": "validation", "length": length}
    values: dict[str, float | None] = {"masked loss": None, "masked accuracy": None}
    if count:
        line["predicted_tokens"] = count
        accuracy = math.nan if math.isnan(loss) else right / count
        values = {"masked loss": loss / count, "masked accuracy": accuracy}
    else:
        nothing = "the validation text has only special tokens: nothing was hidden"
        line["reason"] = reason or nothing
    return [{"metric": metric, "value": value, **line} for metric, value in values.items()]


def _unread(model: Any, corpus: Corpus, length: int) -> str:
    """Why no window of this length can be read; "" where one can."""
    if reason := lack_of_positions(model, length):
        return reason
    if not any(len(stream) >= length for stream in corpus.split("validation")):
        return f"the validation split holds no window of {length:,} tokens"
    return ""
