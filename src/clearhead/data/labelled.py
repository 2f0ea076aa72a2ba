"""Labelled texts: rows of a file to token ids and to padded batches."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead.data import readers
from clearhead.data.seeded import permutation
from clearhead.data.tokenizer import Encoder
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of
from clearhead.settings.data import Task


class Row(NamedTuple):
    """One text or two, the label as in the file, and the row's place for error messages."""

    text: str
    pair: str | None
    label: Any
    where: str


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Encoded texts ("input_ids", and "token_type_ids" where the tokenizer makes them) with their
    labels, class numbers from 0 or floats, and a hex hash of both."""

    inputs: list[dict[str, list[int]]]
    labels: list[int] | list[float]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)


def read_rows(
    source: str, task: Task, *, cache: Path, progress: Callable[[str], None], options: str = "--"
) -> list[Row]:
    """The rows of a .jsonl(.gz) file, or of `hf:name[:config][#split]`; for error messages,
    `options` is the prefix of the options that name fields."""
    path = Path(os.path.expanduser(source))
    if source.startswith(readers.HUB):
        entries = readers.hub_rows(source, readers.pinned_revision(source, cache, progress))
    elif path.is_file() and readers.ending(path.name) == readers.JSON_LINES:
        entries = readers.json_rows(path)
    else:
        raise ClearheadError(
            f"{source!r}: no such file of JSON lines; give a .jsonl(.gz) file, or hf:NAME"
        )
    rows = []
    for where, row in entries:
        text = readers.text_of(row, task.text, where, f"{options}text-field")
        pair = None
        if task.pair is not None:
            pair = readers.text_of(row, task.pair, where, f"{options}pair-field")
        label = readers.value_of(row, task.label, where, f"{options}label-field")
        rows.append(Row(text, pair, label, where))
    if not rows:
        raise ClearheadError(f"{source!r} holds no row: give a file with labelled rows")
    return rows


def classes_of(rows: Sequence[Row], task: Task) -> tuple[str, ...]:
    """The task's classes in order or, if it names none, those that occur in the rows, sorted."""
    if task.regression or task.classes:
        return task.classes
    for row in rows:
        if not isinstance(row.label, str | int):
            raise ClearheadError(
                f"{row.where}: a label is a name or a whole number; found {row.label!r}"
            )
    labels = {row.label for row in rows}
    named = any(isinstance(label, str) for label in labels)
    ordered = sorted(labels, key=str if named else None)
    classes = tuple(dict.fromkeys(map(str, ordered)))  # 1 and "1" are one class
    if len(classes) < 2:
        raise ClearheadError(f"all {len(rows)} training rows have class {classes[0]!r}: give two")
    return classes


def labels_of(rows: Sequence[Row], classes: Sequence[str], task: Task) -> list[int] | list[float]:
    """Labels as a loss takes them: class numbers, or floats for a regression. An integer label is a
    class's index where the task names its classes, otherwise its name."""
    numbers = {str(number): number for number in range(len(task.classes))}
    numbers |= {name: number for number, name in enumerate(classes)}
    labels: list[Any] = []
    for row in rows:
        label: float | None = None if task.regression else numbers.get(str(row.label))
        if task.regression and type(row.label) in (int, float) and math.isfinite(row.label):
            label = float(row.label)
        if label is None:
            known = ", ".join(classes[:8]) + (" …" if len(classes) > 8 else "")
            fault = f"outside the {len(classes)} classes ({known})"
            fault = "no number" if task.regression else fault
            raise ClearheadError(f"{row.where}: label {row.label!r} is {fault} of {task.name}")
        labels.append(label)
    return labels


def encode(
    rows: Sequence[Row], labels: list[int] | list[float], tokenizer: Any, *, length: int
) -> Labelled:
    """Texts to ids of at most `length`; of two texts the longer one loses its end first.

    A tokenizer that adds special tokens itself, as BERT's does, adds them here too. Others, such as
    ours, give BEGIN text END, and BEGIN text END pair END; text never yields a special token.
    """
    parts = 1 if rows[0].pair is None else 2
    if tokenizer.num_special_tokens_to_add(pair=parts == 2):
        cut = {"truncation": "longest_first", "max_length": length}
        encoded = (tokenizer(row.text, row.pair, **cut) for row in rows)
        names = ("input_ids", "token_type_ids")
        inputs = [{name: one[name] for name in names if name in one} for one in encoded]
    else:
        encoder = Encoder(tokenizer)
        if encoder.end is None:
            raise ClearheadError("the tokenizer has no end token to close a text: give another")
        begin = [] if encoder.begin is None else [encoder.begin]
        room = length - len(begin) - parts
        if room < parts:
            raise ClearheadError(
                f"max_length is {length}: raise it to hold special tokens and text"
            )
        texts = encoder.encode([row.text for row in rows])
        pairs = encoder.encode([row.pair or "" for row in rows])
        inputs = []
        for text, pair in zip(texts, pairs, strict=True):
            second = min(len(pair), max(room // 2, room - len(text)))
            ids = [*begin, *text[: room - second].tolist(), encoder.end]
            if parts == 2:
                ids += [*pair[:second].tolist(), encoder.end]
            inputs.append({"input_ids": ids})
    fingerprint = digest_of([*([row.text, row.pair] for row in rows), labels])
    return Labelled(inputs=inputs, labels=labels, fingerprint=fingerprint)


class LabelledBatches:
    """Random-access batches: epochs over all texts, each epoch in its own seeded order.

    An epoch, `per_epoch` batches, may end in a smaller one. Rows are padded to the longest of their
    batch. Without a seed texts keep the given order. The `objective` is "classification": each text
    has one label. A run resumes only on batches with its own `fingerprint`, a hash of the data.
    """

    objective = "classification"

    def __init__(
        self, data: Labelled, tokenizer: Any, *, batch_size: int, seed: int | None
    ) -> None:
        from transformers import DataCollatorWithPadding

        self.data = data
        self.batch_size = batch_size
        self.fingerprint = data.fingerprint
        self.per_epoch = -(-len(data) // batch_size)
        self._collate = DataCollatorWithPadding(tokenizer)

        @lru_cache(1)
        def order(epoch: int) -> list[int]:
            if seed is None:
                return list(range(len(data)))
            return permutation(f"seed {seed}, epoch {epoch} of labelled texts", len(data)).tolist()

        self._order = order

    def epoch(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of the first epoch."""
        return map(self.batch, range(self.per_epoch))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """ "input_ids", "attention_mask" (and "token_type_ids"), int64 [B, T]; "labels" [B]."""
        epoch, turn = divmod(step, self.per_epoch)
        chosen = self._order(epoch)[turn * self.batch_size : (turn + 1) * self.batch_size]
        texts = [{**self.data.inputs[one], "labels": self.data.labels[one]} for one in chosen]
        return dict(self._collate(texts))

    def tokens_before(self, step: int) -> int:
        """Tokens of the texts of all earlier batches, without padding."""
        epoch, turn = divmod(step, self.per_epoch)
        lengths = [len(one["input_ids"]) for one in self.data.inputs]
        read = self._order(epoch)[: turn * self.batch_size]
        return epoch * sum(lengths) + sum(lengths[one] for one in read)
