"""Losses by length: perplexity, pooled and by document; at AR-hits and all other tokens; of masked
language models at hidden tokens.

An AR-hit (associative recall; Arora et al., arXiv 2312.04927) is the last token of a bigram that
occurred earlier in the same window; as in arXiv 2410.05258 (table 6) all of them count.
"""

import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from clearhead.data import Corpus, Masking, windows, with_mask_token
from clearhead.data.batches import IGNORED, document_inputs, document_starts
from clearhead.errors import ClearheadError
from clearhead.eval.sliding import BATCH, Scored, perplexity_of, sliding, windows_of
from clearhead.measure.sweep import Cell, Document, Subject
from clearhead.models.inspection import batches, evaluating, lack_of_positions, opened
from clearhead.records.cells import lines_of
from clearhead.records.runs import Line
from clearhead.settings.data import SHARE
from clearhead.settings.eval import PerplexityOptions, TaskOptions


class PerplexityTask(PerplexityOptions):
    drawn = False
    headlines = ("perplexity",)

    def cells(self, subject: Subject) -> list[Cell]:
        for length in subject.lengths:
            next(windows_of(2, length, self._stride(length)))  # refuses impossible strides
            subject.check_length(length)
        self.chosen(subject)
        # The longest decides which documents are read.
        return [{"length": one, "longest": subject.lengths[-1]} for one in subject.lengths]

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        length, chosen = cell["length"], self.chosen(subject)
        sums = np.zeros((len(chosen), 2))
        for window in self.scored(subject, chosen, length):
            sums[window.document] += window.loss.sum(), len(window.loss)
        return lines_of(
            self.headlines,
            stride=self._stride(length),
            **_of(*sums.sum(0)),
            left_out=0 if self.text == "stream" else len(subject.texts.documents) - len(chosen),
            documents=[
                {"document": one.name, **_of(*row)} for one, row in zip(chosen, sums, strict=True)
            ],
        )

    def scored(self, subject: Subject, chosen: list[Document], length: int) -> list[Scored]:
        """The windows of the chosen documents."""
        how: Any = {"stride": self._stride(length), "batch_tokens": subject.batch_tokens}
        return sliding(subject.model, [one.ids for one in chosen], length=length, **how)

    def chosen(self, subject: Subject) -> list[Document]:
        """The documents that are read, the same for every length."""
        longest, stream = subject.lengths[-1], self.text == "stream"
        if stream and self.document_tokens is not None:
            raise ClearheadError("document-tokens has no effect on --perplexity.text stream")
        texts = subject.texts.streams if stream else subject.texts.documents
        documents = [one for one in texts if len(one.ids) >= longest]
        if not documents:
            most = max((len(one.ids) for one in texts), default=0)
            found = f"{longest:,} tokens (the longest of {len(texts):,} has {most:,})"
            advice = "give shorter lengths or --perplexity.text stream"
            raise ClearheadError(f"no document of {found}: {advice}")
        each = self.document_tokens or longest
        if stream:
            each = max(longest, subject.tokens // len(documents))
        if each < longest:
            raise ClearheadError(f"document-tokens is {each}: give at least one window, {longest}")
        cut = [Document(document.name, document.ids[:each]) for document in documents]
        whole = sum(end <= subject.tokens for end in accumulate(len(one.ids) for one in cut))
        return cut[: max(1, whole)]

    def _stride(self, length: int) -> int:
        return max(1, length // 2) if self.stride is None else self.stride


class HitsTask(TaskOptions):
    """AR-hits over each source as one text, as in training, in adjacent windows."""

    drawn = False
    headlines = ("ar_hit_loss", "others_loss")

    def cells(self, subject: Subject) -> list[Cell]:
        return PerplexityTask(text="stream").cells(subject)

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        length = cell["length"]
        reading = PerplexityTask(text="stream", stride=length)
        chosen = reading.chosen(subject)
        sums = np.zeros((2, 2))  # of other tokens and of hits: loss, count
        for window in reading.scored(subject, chosen, length):
            ids = chosen[window.document].ids[window.start : window.start + length]
            read = opened(subject.model, torch.from_numpy(ids.astype(np.int64)))
            hit = hits(read.numpy())[window.position :]
            for kind in (0, 1):
                losses = window.loss[hit == kind]
                sums[kind] += losses.sum(), len(losses)
        (other, others), (of_hits, count) = sums
        return lines_of(
            self.headlines,
            ar_hit_loss=of_hits / count if count else None,
            others_loss=other / others if others else None,
            loss=(of_hits + other) / (count + others),
            ar_hits=int(count),
            predicted_tokens=int(count + others),
        )


def hits(ids: np.ndarray) -> np.ndarray:
    """Mask of tokens that end a bigram which occurred earlier in `ids`, bool [tokens]."""
    recurring, seen = [False], set[tuple[int, int]]()
    for pair in pairwise(ids.tolist()):
        recurring.append(pair in seen)
        seen.add(pair)
    return np.array(recurring)


def _of(total: float, count: float) -> dict[str, Any]:
    loss = total / count
    return {"loss": loss, "perplexity": perplexity_of(loss), "predicted_tokens": int(count)}


class MaskedTask(TaskOptions):
    drawn = False
    headlines = ("masked_loss", "masked_accuracy")

    def cells(self, subject: Subject) -> list[Cell]:
        if subject.texts.splits != ("validation",):
            raise ClearheadError("masked reads the held-out documents only: leave split out")
        for length in subject.lengths:
            subject.check_length(length)
            windows(subject.texts.corpus, length=length)  # refuses a text without a window
        return [{"length": length} for length in subject.lengths]

    def measure(self, subject: Subject, cell: Cell) -> list[Line]:
        corpus, length = with_mask_token(subject.texts.corpus), cell["length"]
        lines = masked_loss(subject.model, corpus, length=length, tokens=subject.tokens)
        numbers = {line["metric"].replace(" ", "_"): line["value"] for line in lines}
        read = {name: lines[0].get(name) for name in ("predicted_tokens", "reason")}
        return lines_of(self.headlines, **numbers, **read)


def masked_loss(
    model: Any, corpus: Corpus, *, length: int, tokens: int, documents_apart: bool = False
) -> list[dict[str, Any]]:
    """Payloads of records: "masked loss" (nats a hidden token) and "masked accuracy" on about
    `tokens` tokens of the validation text, the same hidden places for every model; None with a
    "reason" where the model or the text is too short for windows of `length`.

    Not a perplexity: each token is predicted from the shown tokens of its window on both sides. The
    corpus has a mask token (`clearhead.data.with_mask_token`). With `documents_apart` windows are
    read as in training with document masks.
    """
    loss, right, count = 0.0, 0, 0
    reason = lack_of_positions(model, length)
    if not any(len(stream) >= length for stream in corpus.split("validation")):
        reason = f"the validation split holds no window of {length:,} tokens"
    texts = () if reason else windows(corpus, length=length, count=max(1, tokens // length))
    masking = Masking(corpus.tokenizer, SHARE)
    read = batches(model, texts, max(1, BATCH // length)) if texts else ()
    with evaluating(model):
        for number, ids_BT in enumerate(read):
            arrays = masking(ids_BT.cpu().numpy(), f"validation, masks of batch {number}")
            shown_BT, labels_BT = (torch.from_numpy(array).to(ids_BT.device) for array in arrays)
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
        line["reason"] = reason or "the validation text has only special tokens"
    return [{"metric": metric, "value": value, **line} for metric, value in values.items()]
