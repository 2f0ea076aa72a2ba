"""Options of the evaluation tasks, for the command line and for records; imports no torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from clearhead.errors import ClearheadError
from clearhead.metavars import Field, File, Folder, Grid, Model, Number, TaskName, Url, Variable
from clearhead.ranges import Count, Fraction, Natural, Positive

# Marks an option that only lists cells: cells name its values, so more may be added later.
LISTED = {"listed": True}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILL = "fill"
_URL = re.compile(r"https?://[^@?#\s]+")


def parted(words: Sequence[str]) -> list[str]:
    """Split words at commas, without duplicates."""
    return list(dict.fromkeys(filter(None, (one for word in words for one in word.split(",")))))


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of a task; their ranges are checked with those of the whole command."""

    drawn: ClassVar[bool] = True  # by a seed, as of `measure.sweep`

    def __post_init__(self) -> None:
        for option in fields(self):
            default = option.default
            if isinstance(default, tuple) and default and not getattr(self, option.name):
                raise ClearheadError(f"{option.name} are none: give at least one")


@dataclass(frozen=True, kw_only=True)
class AllocationOptions(TaskOptions):
    """Attention of the last token to a needle, by length and depth."""

    depths: tuple[Fraction, ...] = DEPTHS
    """Shares of the filler that come before the needle."""
    samples: Count = 20
    """Contexts at each length and depth."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The model that judges texts; none unless it is named."""

    endpoint: Url = ""
    """Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: Model = ""
    """Name by which the server knows the model."""
    key_variable: Variable = ""
    """Environment variable with the server's key; none is sent unless given."""
    new_tokens: Count = 512
    """Tokens of a verdict, its explanation included."""
    timeout: Positive = 120.0
    """Seconds that the server may take over a reply."""

    def check(self) -> None:
        """Refuse a judge without model or endpoint, a URL with a secret, and a key not set."""
        if self != JudgeConfig() and not (self.model and _URL.fullmatch(self.endpoint)):
            url = "a URL without user and parameters, such as http://127.0.0.1:8000/v1"
            raise ClearheadError(f"a judge needs a judge.model and a judge.endpoint, {url}")
        if self.key_variable and not os.environ.get(self.key_variable, "").strip():
            raise ClearheadError(f"judge.key-variable: set ${self.key_variable} to the key")


@dataclass(frozen=True, kw_only=True)
class HallucinationOptions(TaskOptions):
    """Summaries that keep to their documents, by a judge or by a count of names."""

    files: tuple[File, ...] = field(default=(), metadata=LISTED)
    """.jsonl(.gz) files or hf:NAME[:CONFIG][#SPLIT], each measured at each length."""
    text_field: Field = "document"
    """Field of a row that holds the document."""
    label_field: Field = "summary"
    """Field of a row that holds a person's summary."""
    samples: Count = 100
    """Number of rows drawn from each file, or all if it has fewer."""
    summary_tokens: Count = 128
    """Tokens of a summary, at most."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """The model that judges texts; none unless it is named."""


@dataclass(frozen=True, kw_only=True)
class HarnessOptions(TaskOptions):
    """Tasks of lm-eval by their names there, on its prompts, its data and its metrics."""

    tasks: tuple[TaskName, ...] = field(default=(), metadata=LISTED)
    """Tasks, groups and tags of lm-eval; --tasks takes their names too."""
    shots: Natural | None = None
    """Examples before each question; by default the task's own number."""
    limit: Count | None = None
    """Number of items of each task, from its first; by default all."""
    include_path: Folder = ""
    """A folder of your own task files (.yaml); the functions and templates in them are run."""


@dataclass(frozen=True, kw_only=True)
class NeedlesOptions(TaskOptions):
    """Retrieval of some of several numbers, by length and depth."""

    grid: tuple[Grid, ...] = ("1x1", "2x2", "4x2", "6x2")
    """NxR: N needles, R of them asked for."""
    depths: tuple[Fraction, ...] = DEPTHS
    """Shares of the filler that come before the needles asked for."""
    samples: Count = 50
    """Contexts at each length and depth."""
    new_tokens: Count = 10
    """Tokens to generate for an answer."""


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(TaskOptions):
    """Retrieval of a number from filler, by length and depth."""

    depths: tuple[Fraction, ...] = DEPTHS
    """Shares of the filler that come before the key."""
    trials: Count = 20
    """Keys at each length and depth."""
    wording: Literal["paper", "landmark"] = "paper"
    """The prompt: the CoCA paper's, or landmark attention's."""
    new_tokens: Count | None = None
    """Tokens to generate; by default 64, or 10 with landmark's prompt."""


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(TaskOptions):
    """Sliding-window perplexity (Press et al.), in float32."""

    stride: Count | None = None
    """Tokens from one window to the next; by default half of each length."""
    text: Literal["document", "stream"] = "document"
    """document: windows inside single documents, those at least as long as the longest length;
    stream: windows across all documents of a source, end to end."""
    document_tokens: Count | None = None
    """Largest number of tokens read of a document; by default the longest length."""


@dataclass(frozen=True, kw_only=True)
class RecallOptions(TaskOptions):
    """Recall of values by their keys, by length and number of pairs."""

    pairs: tuple[Count, ...] = (4, 12)
    """Numbers of pairs in the list, each measured by itself."""
    queries: Count = 8
    """Pairs asked for, at most all."""
    samples: Count = 50
    """Lists at each length and number of pairs."""


@dataclass(frozen=True, kw_only=True)
class ShotsOptions(TaskOptions):
    """Classification by demonstrations in the context, by length and shots."""

    data: File = ""
    """Labelled texts to show: rows with a text and a label, of a .jsonl(.gz) file or
    hf:NAME[:CONFIG][#SPLIT]."""
    test: File = ""
    """Labelled texts to classify; by default some of data, which are then not shown."""
    text_field: Field = "text"
    """Field of a row that holds the text."""
    label_field: Field = "label"
    """Field of a row that holds the label."""
    counts: tuple[Number, ...] = (FILL,)
    """Demonstrations: whole numbers, or fill, as many as fit each length."""
    queries: Count = 100
    """Texts to classify at each length and number of demonstrations."""
    permutations: Count = 5
    """Orders drawn of the same demonstrations."""


OPTIONS: Mapping[str, type] = {
    "perplexity": PerplexityOptions,
    "passkey": PasskeyOptions,
    "needles": NeedlesOptions,
    "recall": RecallOptions,
    "hits": TaskOptions,
    "allocation": AllocationOptions,
    "shots": ShotsOptions,
    "masked": TaskOptions,
    "lm_eval": HarnessOptions,
    "hallucination": HallucinationOptions,
}
