"""clearhead eval: what a model can do with a text, by length, depth and rope scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from clearhead.cli.models import load_model, refuse_tokenizer
from clearhead.cli.options import OpensModels, parse
from clearhead.data import DataConfig, prepare
from clearhead.errors import ClearheadError, choose
from clearhead.eval import TASKS, WITHOUT_LENGTH, Subject, Task, Texts, check_names, parted
from clearhead.experiments.evaluation import NONE, Scaling, Watcher, evaluate, scalings
from clearhead.models import SCALINGS
from clearhead.ranges import Count, Length
from clearhead.records.loading import parse as parse_lines
from clearhead.records.lock import hold_file
from clearhead.report import console as shown
from clearhead.report.evaluation import scaling_name, tables
from clearhead.terminal import console, say
from clearhead.train.folder import RUN_FILE, read_record

MASKED, HARNESS = "masked", "lm_eval"


@dataclass(frozen=True, kw_only=True)
class Settings(OpensModels):
    """What to measure, on what text."""

    model: Positional[str]
    """A checkpoint's folder (RUN/final), or a hub name."""
    tasks: tuple[str, ...] = ()
    """Of perplexity, passkey, needles, recall, hits, allocation, choices, shots, hallucination;
    masked for a masked one; any other name is a task of lm-eval. Unless given, perplexity or
    masked."""
    lengths: tuple[Length, ...] = ()
    """Lengths in tokens; unless given, 1, 2, 4 and 8 times max_position_embeddings."""
    tokens: Length = 65_536
    """Tokens of text read at each length, about."""
    rope_scaling: tuple[str, ...] = (NONE,)
    """Of none, linear, ntk, dynamic, dynamic-causal, yarn: each task is measured under each."""
    factors: tuple[str, ...] = ()
    """Factors of the scalings."""
    split: Literal["validation", "all"] = "validation"
    """Documents that are read: the held-out ones, or all (for a file that no training saw)."""
    batch_tokens: Count = 8192
    """Tokens run together; no result depends on it."""
    seed: int = 0
    """Of keys, needles, places and samples."""
    name: str = ""
    """The run's name in the records; unless given, that of the training run, or the folder's."""
    label: str = ""
    """Names the set of records on a report."""
    records: Path | None = None
    """Append each cell to this file as it is done; the same command goes on where it stopped.
    Texts that a task has the model write are kept beside it, in FILE.texts."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is the model's own."""


Command = make_dataclass(
    "Command",
    [(name, kind, field(default_factory=kind)) for name, kind in TASKS.items()],
    bases=(Settings,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": Settings.__doc__},
)


def run(words: list[str]) -> int:
    command: Any = parse(
        Command,
        words,
        verb="eval",
        description="Evaluate a model, by length, depth and rope scaling; losses in float32. "
        "Lists, but of files and sources, may also be separated by commas.",
    )
    named, command = _named(command)
    variants = _variants(command)
    refuse_tokenizer(command.data)
    with hold_file(command.records):
        return _evaluate(command, named, variants)


def _evaluate(command: Any, named: list[str], variants: list[Scaling]) -> int:
    model, tokenizer = load_model(
        command.model, kinds=("causal", "masked"), trust_remote_code=command.trust_remote_code
    )
    tasks = _tasks(command, named, model)
    subject = Subject(
        model=model,
        tokenizer=tokenizer,
        texts=Texts(
            lambda: prepare(command.data, tokenizer=tokenizer, progress=say),
            ("train", "validation") if command.split == "all" else ("validation",),
        ),
        lengths=_lengths(command.lengths, model, tasks),
        tokens=command.tokens,
        batch_tokens=command.batch_tokens,
        seed=command.seed,
        kept=command.records and command.records.with_name(f"{command.records.name}.texts"),
    )
    header = _header(command)
    bar = _Bar()
    try:
        with bar:
            lines = evaluate(
                subject, tasks, variants, run=header, records=command.records, watcher=bar
            )
    except ClearheadError:
        _print(bar.lines, header)  # what was measured before
        raise
    _print(lines, header)
    return 0


def _print(lines: Sequence[Mapping[str, Any]], header: dict[str, Any]) -> None:
    out = console()
    for pivot in tables(parse_lines([header, *map(dict, lines)]), header["run"]):
        for part in shown.tables(pivot, threshold=0.0):
            out.print(part)


def _named(command: Any) -> tuple[list[str], Any]:
    """The tasks by name, each once; those that are not clearhead's own are given to lm_eval."""
    words = parted(command.tasks)
    named = list(dict.fromkeys(word if word in TASKS else HARNESS for word in words))
    theirs = [word for word in words if word not in TASKS]
    tasks = tuple(parted((*command.lm_eval.tasks, *theirs)))
    if HARNESS in named and tasks:
        check_names(tasks, command.lm_eval.include_path, others=TASKS)
        command = replace(command, lm_eval=replace(command.lm_eval, tasks=tasks))
    return named, command


def _tasks(command: Any, named: list[str], model: Any) -> dict[str, Task]:
    """The tasks with their options, where all that is asked for has an effect."""
    masked = "MaskedLM" in type(model).__name__
    names = named or [MASKED if masked else "perplexity"]
    if misfits := [name for name in names if (name == MASKED) != masked]:
        does = "hidden tokens: its task is masked" if masked else "the next token: leave masked out"
        raise ClearheadError(f"{misfits[0]} is not for {command.model}, which predicts {does}")
    for name, kind in TASKS.items():
        if name not in names and getattr(command, name) != kind():
            raise ClearheadError(
                f"options of {name} have no effect without it: add it to --tasks, or leave them out"
            )
    return {name: getattr(command, name) for name in names}


def _variants(command: Any) -> list[Scaling]:
    kinds = [
        choose("rope scaling", kind, (NONE, *SCALINGS)) for kind in parted(command.rope_scaling)
    ]
    factors = []
    for word in parted(command.factors):
        try:
            factors.append(float(word))
        except ValueError:
            raise ClearheadError(f"factor {word!r} is not a number above 1") from None
    return scalings(kinds, factors)


def _lengths(given: tuple[int, ...], model: Any, tasks: Mapping[str, Task]) -> tuple[int, ...]:
    if all(name in WITHOUT_LENGTH for name in tasks):
        if given:
            raise ClearheadError(
                f"lengths have no effect on {', '.join(tasks)}, whose texts are as long as they "
                "are: leave them out"
            )
        return ()
    if given:
        return tuple(sorted(set(given)))
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is None:
        raise ClearheadError(
            f"{type(model).__name__} does not say for which length it was trained: give --lengths"
        )
    return tuple(multiple * trained for multiple in (1, 2, 4, 8))


def _header(command: Any) -> dict[str, Any]:
    """The run's line: what the training run said of itself, where the model is part of one."""
    folder = Path(command.model)
    made: dict[str, Any] = {}
    for place in (folder, folder.parent):
        if (place / RUN_FILE).is_file():
            made = read_record(place)
            break
    name = command.name or made.get("run") or folder.resolve().name
    settings = {key: value for key, value in asdict(command).items() if key != "data"}
    return {
        "kind": "run",
        "run": name,
        "preset": made.get("description", {}).get("preset") or str(name).partition("/")[0],
        "size": "",
        "seed": made.get("seed", 0),
        "label": command.label,
        "train": made.get("config", {}),
        "evaluation": settings,
    }


class _Bar(Watcher):
    """A line of progress: cells done of all, which one is at work, and how far it is."""

    def __init__(self) -> None:
        self.lines = list[Mapping[str, Any]]()

    def __enter__(self) -> "_Bar":
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console(stderr=True),
            transient=True,
        )
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def started(self, cells: int, done: int) -> None:
        self._task = self._progress.add_task("", total=cells, completed=done)

    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        rest = " ".join(
            f"{key} {value}" for key, value in at.items() if key not in ("scaling", "factor")
        )
        self._what, self._steps = f"{task}, {scaling_name(at)}, {rest}", 0
        self._progress.update(self._task, description=self._what)

    def advanced(self, steps: int) -> None:
        self._steps += steps
        self._progress.update(self._task, description=f"{self._what}: {self._steps} done")

    def finished(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self._progress.advance(self._task)
