"""Multiple choice by likelihood: the answer whose text the model finds likeliest is its choice."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from clearhead.diagnose.running import batches, evaluating, longest_text
from clearhead.errors import ClearheadError

_FIELDS = "choices (texts), label (the index of the right one) and question or context"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What comes before each answer, the answers' texts, and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Over `questions`: by the summed log-likelihood, and by that divided by the answer's bytes.

    chance: what guessing gives, the mean of 1 / choices. error: one standard error of an accuracy
    of `normalised`, by the binomial distribution.
    """

    questions: int
    raw: float
    normalised: float
    chance: float

    @property
    def error(self) -> float:
        return (self.normalised * (1 - self.normalised) / self.questions) ** 0.5


def load_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a .jsonl or .jsonl.gz file, the first `limit` of them.

    A row has "choices", "label" and either "question", asked as "Question: …\\nAnswer:", or
    "context", which is continued (after "activity_label: " where there is one, as in HellaSwag).

    Raises:
        ClearheadError: a row without these fields, naming it and what it has, or no row.
    """
    questions = []
    for number, row in rows(path):
        questions.append(_question(row, f"{path}, line {number}"))
        if len(questions) == limit:
            break
    if not questions:
        raise ClearheadError(f"{path} has no questions: give a row of {_FIELDS} a line")
    return questions


def accuracy(model: Any, tokenizer: Any, questions: Sequence[Question]) -> Accuracy:
    """How often a causal language model chooses right.

    A prompt and an answer are tokenised together, after the tokenizer's begin token where it has
    one; the answer's tokens are those beyond the prompt's own. One answer is run at a time, so that
    a quantiser's scale never depends on what else is in a batch. A prompt too long for the model
    loses its beginning.

    Raises:
        ClearheadError: an answer longer than the model can read, or token ids unknown to the model.
    """
    raw = normalised = 0
    with evaluating(model):
        for question in questions:
            scores = [_score(model, tokenizer, question, choice) for choice in question.choices]
            sizes = [len(choice.encode()) for choice in question.choices]
            raw += _best(scores) == question.label
            by_byte = [score / size for score, size in zip(scores, sizes, strict=True)]
            normalised += _best(by_byte) == question.label
    count = len(questions)
    return Accuracy(
        questions=count,
        raw=raw / count,
        normalised=normalised / count,
        chance=sum(1 / len(question.choices) for question in questions) / count,
    )


def _best(scores: Sequence[float]) -> int:
    if any(score != score for score in scores):
        raise ClearheadError("the model's log-likelihood of an answer is NaN")
    return max(range(len(scores)), key=scores.__getitem__)


def _score(model: Any, tokenizer: Any, question: Question, choice: str) -> float:
    """log P(choice | prompt), in nats."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt = begin + tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
    whole = begin + tokenizer(f"{question.prompt} {choice}", add_special_tokens=False)["input_ids"]
    answer = len(whole) - min(len(prompt), len(whole) - 1)
    stated = getattr(model.config, "max_position_embeddings", None)
    limit = longest_text(model) or stated or len(whole)
    if answer >= limit:
        raise ClearheadError(
            f"an answer of {answer} tokens leaves no room for its question in the model's {limit}"
        )
    ids = torch.tensor(whole[-limit:], dtype=torch.int64)
    (ids_1T,) = batches(model, [ids], 1)
    logits_NV = model(input_ids=ids_1T, use_cache=False).logits[0, -answer - 1 : -1].float()
    return -float(F.cross_entropy(logits_NV, ids_1T[0, -answer:], reduction="sum"))


def rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a .jsonl or .jsonl.gz file, each with the number of its line.

    Raises:
        ClearheadError: a file of another kind.
    """
    reader = gzip.open if path.suffix == ".gz" else open
    try:
        with reader(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ClearheadError(f"{path}, line {number} is no object of fields")
                yield number, row
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = str(error).splitlines()[0]
        raise ClearheadError(f"{path} is no .jsonl or .jsonl.gz file: {reason}") from error


def _question(row: Mapping[str, Any], where: str) -> Question:
    choices, label = row.get("choices"), row.get("label")
    stem = row.get("question", row.get("context"))
    good = isinstance(choices, list) and len(choices) > 1 and isinstance(stem, str) and stem
    if not good or not all(isinstance(choice, str) and choice for choice in choices or []):
        raise ClearheadError(f"{where} lacks {_FIELDS}; it has {', '.join(row) or 'nothing'}")
    assert isinstance(choices, list)
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
        raise ClearheadError(
            f"{where}: label is {label!r}, and the {len(choices)} choices count from 0"
        )
    if "question" in row:
        prompt = f"Question: {stem}\nAnswer:"
    else:
        topic = row.get("activity_label")
        prompt = f"{topic}: {stem}" if isinstance(topic, str) else str(stem)
    return Question(prompt=prompt, choices=tuple(choices), label=label)
