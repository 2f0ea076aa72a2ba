"""Measurements: tasks on subjects, cell by cell, each written to the records as it is measured.
Cells of the same weights, text, options and seed that are in the records are not measured again.

A task is a frozen dataclass of its options, which records keep. `cells(subject)` lists its cells as
dimensions of records, neighbours sharing most work, and refuses impossible ones at once; a "digest"
is of the files read. `measure(subject, cell)` returns a cell's lines. A task whose text is `drawn`
by a seed is measured under several. `headlines`, the metrics shown in tables, have no value in a
cell with non-finite logits.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from clearhead.data import Corpus
from clearhead.data.tokenizer import Encoder
from clearhead.errors import NotFinite
from clearhead.measure.answers import Reader
from clearhead.models.inspection import dtype_name, require_positions, within_memory
from clearhead.progress import Work
from clearhead.records.cells import unmeasured
from clearhead.records.identity import canonical, digest_of
from clearhead.records.loading import Store
from clearhead.records.provenance import provenance
from clearhead.records.runs import COMPARISON, DRAW, Line
from clearhead.train.memory import PeakMemory

Cell = Mapping[str, Any]


class Document(NamedTuple):
    """A text: its name in results, and its tokens, 1-D."""

    name: str
    ids: np.ndarray


class Texts:
    """A corpus that is prepared when a task first reads it; some tasks need none."""

    def __init__(self, prepare: Callable[[], Corpus], splits: Sequence[str]) -> None:
        self._prepare = prepare
        self.splits = tuple(splits)

    @property
    def read(self) -> Corpus | None:
        """The corpus, if any task has read it."""
        return self.__dict__.get("corpus")

    @cached_property
    def corpus(self) -> Corpus:
        return self._prepare()

    @cached_property
    def documents(self) -> list[Document]:
        """The documents of the splits, source by source, with their BEGIN and END."""
        documents, decode = [], self.corpus.tokenizer.decode
        for split in self.splits:
            for stream in self.corpus.split(split):
                for number, ids in enumerate(np.split(stream.tokens, stream.starts)[1:]):
                    opening = decode(ids[:24].tolist(), skip_special_tokens=True).split()
                    name = f"{stream.spec} {split} {number}: {' '.join(opening)[:40]}"
                    documents.append(Document(name, ids))
        return documents

    @property
    def streams(self) -> list[Document]:
        """Each source's documents of a split end to end, as one text."""
        named = [(split, one) for split in self.splits for one in self.corpus.split(split)]
        return [Document(f"{one.spec} {split}", one.tokens) for split, one in named if len(one)]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A transformers model with its tokenizer, and the `texts`, tokenised by it, to measure it on:
    about `tokens` tokens at each of the ascending `lengths` in tokens, `batch_tokens` of them run
    together, on which no result depends; `seed` is that of every random choice."""

    model: Any
    tokenizer: Any
    texts: Texts
    lengths: tuple[int, ...]
    tokens: int
    batch_tokens: int
    seed: int

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the model and its rope scaling."""
        return parameters_digest(self.model, self.model.config.to_json_string())

    @cached_property
    def reader(self) -> Reader:
        # A chat model's turn may end with another token than a text.
        more = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = {self.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])}
        return Reader(self.model, self.batch_tokens, ends - {None})

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer)

    @property
    def begin(self) -> tuple[int, ...]:
        """The begin token, where the tokenizer has one."""
        return () if self.encoder.begin is None else (self.encoder.begin,)

    def ids(self, *pieces: str) -> list[tuple[int, ...]]:
        """The tokens of one text by its pieces, encoded together, the begin token first."""
        first, *others = self.encoder.pieces(*pieces)
        return [(*self.begin, *first), *others]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def check_length(self, length: int) -> None:
        require_positions(self.model, length, "give shorter lengths or answers")


def parameters_digest(model: Any, start: str = "") -> str:
    """A hash of `start` and of each parameter's name, sum and sum of squares, 16 hex digits."""
    digest = hashlib.sha256(start.encode())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = parameter.double()
            digest.update(f"{name} {wide.sum():.12e} {wide.square().sum():.12e}".encode())
    return digest.hexdigest()[:16]


Portion = tuple[Line, Sequence[tuple[Line, Subject]], Mapping[str, Any], str]
"""One model's part of a sweep: the run's header; the model's variants, such as its rope scalings,
with their dimensions; the tasks by name; and advice for when memory runs out."""


def sweep(
    portion: Portion, seeds: Sequence[int], store: Store, models: int, work: Work
) -> Iterator[list[Line]]:
    """Measure every cell of a model that is not in the store; yield the run's line, then those of
    each cell once it is done. `work` takes all `models` to have as many cells."""
    named, subjects, tasks, less = portion
    cells = list(_planned(subjects, tasks, seeds))
    at_hand = subjects[0][1]
    origin, read = provenance(at_hand.model.device), at_hand.texts.read
    text = {"weights": at_hand.weights, "data": read and read.describe()}
    header = {"kind": "run", **text, **named, "study": store.study, **origin}
    if store.path is not None:
        less += f"; what is done is in {store.path}, and the same command goes on"
    work.start(models * len(cells))
    yield [canonical(header)]
    for subject, cell, key, facts in cells:
        if subject is not at_hand:
            vars(at_hand).pop("reader", None)  # and its cache
            at_hand = subject
        if store.has(key, header):
            work.skip()
            yield store.rows(key, header)
            continue
        task, draw = facts["task"], {DRAW: facts[DRAW]} if DRAW in facts else {}
        common = {**({"task": task} if store.study == COMPARISON else {}), **facts["at"], **draw}
        work.begin(f"{named['run']}, {name_of(facts)}")
        peak, started = PeakMemory(subject.model.device), time.perf_counter()
        try:
            with within_memory(less):
                lines = list(tasks[task].measure(subject, cell))
        except NotFinite as error:
            lines = unmeasured(tasks[task].headlines, error)
        spent = {"seconds": time.perf_counter() - started, "peak_memory_bytes": peak.bytes()}
        made = {**facts["made"], "seed": subject.seed, **origin, **spent}
        yield store.add(key, header, [common | line for line in lines], **{**facts, "made": made})
        work.end()


def _planned(
    subjects: Sequence[tuple[Line, Subject]], tasks: Mapping[str, Any], seeds: Sequence[int]
) -> Iterator[tuple[Subject, Cell, str, Line]]:
    """Cells with their subject, a hash of their settings and seed, and facts for the records."""
    listed = []
    for dimensions, first in subjects:
        for seed in seeds:
            subject = first if seed == first.seed else replace(first, seed=seed)
            vars(subject)["weights"] = first.weights  # of one model
            for name, task in tasks.items():
                if task.drawn or seed == seeds[0]:
                    listed += [(name, subject, dimensions, cell) for cell in task.cells(subject)]
    for name, subject, dimensions, cell in listed:  # only now is it known which text is read
        task, text = tasks[name], subject.texts.read
        made = {
            "weights": subject.weights,
            "data": text and text.fingerprint,
            "splits": list(subject.texts.splits),
            "tokens": subject.tokens,
            "dtype": dtype_name(subject.model),
        }
        listing = {option.name for option in fields(task) if "listed" in option.metadata}
        options = canonical({k: x for k, x in asdict(task).items() if k not in listing})
        at = {**dimensions, **cell}
        key = f"{digest_of([name, at, options, made])[:16]}-{subject.seed if task.drawn else 0}"
        at.pop("digest", None)
        draw = {DRAW: subject.seed} if task.drawn else {}
        made["batch_tokens"] = subject.batch_tokens
        facts = {"task": name, "at": at, **draw, "options": options, "made": made}
        yield subject, cell, key, facts


def name_of(facts: Line) -> str:
    """The name of a cell: "perplexity, scaling yarn, factor 4.0, length 128, seed 1"."""
    places = {**facts["at"], "seed": facts.get(DRAW) or None}
    named = [f"{name} {value}" for name, value in places.items() if value is not None]
    return ", ".join([facts["task"], *named])
