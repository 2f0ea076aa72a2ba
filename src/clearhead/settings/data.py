"""Settings: training text and its conversion to tokens; classification tasks, GLUE and others."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from clearhead.errors import ClearheadError
from clearhead.metavars import Field, Model, Source
from clearhead.ranges import Part, Range, check

SHARE = 0.25  # of the tokens that masked training hides (arXiv 2212.14034; BERT hid 0.15)
SMALLEST_VOCABULARY = 256 + 3  # every byte, and three special tokens
_ENTRIES = f"at least {SMALLEST_VOCABULARY} entries (256 bytes and 3 special tokens), such as 4096"
Vocabulary = Annotated[int, Range(_ENTRIES, lambda n: n >= SMALLEST_VOCABULARY)]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus of a run; a value that cannot work is a ClearheadError at construction.

    Attributes:
        data: sources, each "SPEC" or "SPEC@WEIGHT", where SPEC is `python-stdlib`,
            `python-packages`, a file, a folder, `hf:name[:config][#split]` or
            `synthetic:task[:key=value,…]` (passkey, needle, recall, backcopy). Without weights
            every token of every source counts alike. With weights, which are shares of the tokens,
            at most one source may be without: it gets the rest of 1.
        tokenizer: folder or hub name of an existing tokenizer; None trains a byte-level BPE.
        vocabulary: entries of the trained tokenizer, the 256 bytes and 3 special ones included.
        text_field: the field of a .jsonl, .parquet or hub row that holds its text.
        validation: share of the documents held out, chosen by a hash of their text.
        limit: bytes of text (as UTF-8) after which a source stops; None takes it whole.
        cache: folder of the tokens; None is $CLEARHEAD_CACHE, or else ~/.cache/clearhead.
    """

    data: tuple[Source, ...] = ("python-stdlib",)
    tokenizer: Model | None = None
    vocabulary: Vocabulary = 4096
    text_field: Field = "text"
    validation: Part = 0.02
    limit: Annotated[
        int | None, Range("a number of bytes above 0, or none to take everything", lambda n: n > 0)
    ] = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, str) or not self.data:
            raise ClearheadError(
                f"data is {self.data!r}: give a tuple of one source or more, "
                "for example ('python-stdlib',)"
            )
        check(self)
        if self.tokenizer is not None and self.vocabulary != type(self).vocabulary:
            raise ClearheadError(
                f"vocabulary has no effect beside the tokenizer {self.tokenizer!r}: leave one out"
            )

    @property
    def cache_folder(self) -> Path:
        """The folder for downloads and tokenised text."""
        if self.cache is not None:
            return Path(self.cache)
        return Path(os.environ.get("CLEARHEAD_CACHE") or "~/.cache/clearhead").expanduser()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Fields of a row, and the metric for its answers.

    `text`, `pair` (a second text, if any) and `label` are fields; `classes` are names in the order
    of their indices, or empty for those of the training rows; under `regression` labels are
    numbers. `metrics` are names of `eval.classification.METRICS`, the first is its own. `train` and
    `validation` (with its split's name in records) are `hf:` names, used where no file is given.
    """

    name: str
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    classes: tuple[str, ...] = ()
    regression: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    train: str | None = None
    validation: tuple[tuple[str, str], ...] = ()


def _glue(name: str, fields: str, classes: str, *metrics: str) -> Task:
    text, *pair = fields.split()
    data, splits = f"hf:nyu-mll/glue:{name}", ["validation"]
    if name == "mnli":
        splits = ["validation_matched", "validation_mismatched"]
    return Task(
        name=name,
        text=text,
        pair=pair[0] if pair else None,
        classes=tuple(classes.split()),
        regression=not classes,
        metrics=metrics,
        train=f"{data}#train",
        validation=tuple((split, f"{data}#{split}") for split in splits),
    )


_SENTENCES, _QUESTIONS = "sentence1 sentence2", "question1 question2"
_ENTAILMENT = "entailment not_entailment"

GLUE = {
    task.name: task
    for task in (
        _glue("cola", "sentence", "unacceptable acceptable", "mcc", "accuracy"),
        _glue("sst2", "sentence", "negative positive", "accuracy"),
        _glue("mrpc", _SENTENCES, "not_equivalent equivalent", "f1", "accuracy"),
        _glue("stsb", _SENTENCES, "", "pearson"),
        _glue("qqp", _QUESTIONS, "not_duplicate duplicate", "f1", "accuracy"),
        _glue("mnli", "premise hypothesis", "entailment neutral contradiction", "accuracy"),
        _glue("qnli", "question sentence", _ENTAILMENT, "accuracy"),
        _glue("rte", _SENTENCES, _ENTAILMENT, "accuracy"),
        _glue("wnli", _SENTENCES, "not_entailment entailment", "accuracy"),
    )
}
"""The tasks of GLUE by name, with metrics and classes as in its data sets (arXiv 1804.07461).

The first metric of a task is the one that the crammed BERT and SAS report."""

BANKING = "hf:legacy-datasets/banking77"
"""Banking-77: 77 intents, 10,003 training and 3,080 test questions (arXiv 2003.04807, CC BY 4.0),
the hub's conversion of PolyAI/banking77, a loading script that `datasets` refuses."""
TASKS = GLUE | {
    "banking77": Task(
        name="banking77", train=f"{BANKING}#train", validation=(("test", f"{BANKING}#test"),)
    )
}
"""The tasks that `clearhead finetune --task` knows."""
