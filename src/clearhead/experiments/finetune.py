"""Fine-tuning one checkpoint on one task, with every seed, and asking it the validation texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, Labelled, LabelledBatches, Task, labelled
from clearhead.data.tasks import GLUE
from clearhead.diagnose.running import longest_text
from clearhead.errors import ClearheadError, choose
from clearhead.eval import METRICS, predict
from clearhead.experiments.building import best_device
from clearhead.experiments.classifiers import load_classifier, load_tokenizer
from clearhead.models.loading import resolved
from clearhead.ranges import Natural, check
from clearhead.records import manifest
from clearhead.records.files import publish_folder, remove_leftovers, write_text
from clearhead.records.loading import as_line, load
from clearhead.records.lock import Lock, hold_folder
from clearhead.records.runs import Records
from clearhead.train import FinetuneConfig, Finetuned, finetune
from clearhead.train.checkpoint import save_pretrained
from clearhead.train.folder import describe

RECORDS = "records.jsonl"


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """One checkpoint, one task, some seeds."""

    model: str
    """A checkpoint's folder (RUN/final), or a hub name: causal, masked, or any encoder."""
    trust_remote_code: bool = False
    """Whether Python code that the checkpoint brings may run."""
    task: str | None = None
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli; not given, a task of your own."""
    train_file: str | None = None
    """Training rows: .jsonl(.gz), or hf:NAME[:CONFIG][#SPLIT]. A GLUE task knows its own."""
    validation_file: tuple[str, ...] = ()
    """Validation rows, likewise; several are measured each by itself."""
    text_field: str | None = None
    """The field of the text; GLUE tasks know theirs, otherwise "text"."""
    pair_field: str | None = None
    """The field of a second text, if rows have one."""
    label_field: str | None = None
    """The field of the class; otherwise "label"."""
    seeds: tuple[Natural, ...] = (0,)
    """One run for each; a seed fixes the head's first weights, the order and the dropout."""
    output: Path = Path("runs/finetune")
    """Folder of the models and records; the same command goes on where it stopped."""
    label: str = ""
    """Names the records on a report that shows several sets."""
    train: FinetuneConfig = field(default_factory=FinetuneConfig)
    """Training."""
    cache: Path | None = None
    """Folder for what is downloaded; otherwise $CLEARHEAD_CACHE, or ~/.cache/clearhead."""

    def __post_init__(self) -> None:
        check(self)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ClearheadError(f"seeds must be one or more, each once; found {self.seeds}")
        if self.task is not None:
            choose("task", self.task, GLUE)
        elif self.train_file is None or not self.validation_file:
            raise ClearheadError(
                f"give --task, one of {', '.join(GLUE)}; or --train-file and --validation-file"
            )
        if (self.train_file is None) != (not self.validation_file):
            raise ClearheadError("give train-file and validation-file both, or neither")

    def resolved(self) -> Task:
        """The task with the fields and the files that are given."""
        found = Task(name="text") if self.task is None else GLUE[self.task]
        if self.train_file is not None:
            if self.task is None:
                found = replace(found, name=Path(self.train_file).name.split(".")[0])
            splits = [Path(name).name.split(".")[0] for name in self.validation_file]
            if len(splits) == 1 or len(set(splits)) < len(splits):
                splits = [f"validation {n}" if n else "validation" for n in range(len(splits))]
            found = replace(
                found,
                train=self.train_file,
                validation=tuple(zip(splits, self.validation_file, strict=True)),
            )
        return replace(
            found,
            text=self.text_field or found.text,
            pair=self.pair_field or found.pair,
            label=self.label_field or found.label,
        )


class InterruptedTask(Exception):  # noqa: N818 (a request, not a fault)
    """A signal stopped a seed, which leaves nothing; the same command starts it again."""

    def __init__(self, result: Finetuned) -> None:
        super().__init__("interrupted")
        assert result.stop_signal is not None
        self.code = 128 + result.stop_signal


def run_finetune(job: FinetuneJob, *, say: Callable[[str], None]) -> Records:
    """Fine-tune and measure with every seed; return the records, also in OUTPUT/records.jsonl.

    OUTPUT/seedN holds a seed's model and its records, and is there only whole.

    Raises:
        ClearheadError: for a model, rows, labels or settings that do not work.
        InterruptedTask: after SIGINT or SIGTERM.
    """
    task = job.resolved()
    cache = DataConfig(cache=job.cache).cache_folder
    assert task.train is not None
    rows = labelled.read_rows(task.train, task, cache=cache, progress=say)
    classes = labelled.classes_of(rows, task)
    held = [
        (split, labelled.read_rows(source, task, cache=cache, progress=say))
        for split, source in task.validation
    ]
    # Labels first: a wrong one is better known before a model is loaded.
    labels = labelled.labels_of(rows, classes, task)
    held_labels = [labelled.labels_of(found, classes, task) for _, found in held]
    tokenizer = load_tokenizer(job.model, trust_remote_code=job.trust_remote_code)
    length = job.train.max_length
    training = labelled.encode(rows, labels, tokenizer, length=length)
    validation = [
        (split, labelled.encode(found, known, tokenizer, length=length))
        for (split, found), known in zip(held, held_labels, strict=True)
    ]
    with hold_folder(job.output) as lock:
        remove_leftovers(job.output)
        done = []
        for seed in job.seeds:
            folder = job.output / f"seed{seed}"
            header = _header(job, task, classes, seed, training, validation)
            if (folder / RECORDS).exists():
                _check_same(folder / RECORDS, header)
                say(f"seed {seed}: already done")
            else:
                say(f"seed {seed}: {len(training):,} texts, {len(classes) or 'a number'} classes")
                _run(job, task, header, folder, tokenizer, (training, validation), say, lock)
            done.append(folder / RECORDS)
            text = "".join(path.read_bytes().decode() for path in done)
            write_text(job.output / RECORDS, text)
        return load(job.output / RECORDS)


def model_name(name: str) -> str:
    """What a checkpoint is called in records: its run's folder."""
    path = Path(resolved(name))
    return path.parent.name if path.name == "final" and path.parent.name else path.name


def _header(
    job: FinetuneJob,
    task: Task,
    classes: Sequence[str],
    seed: int,
    training: Labelled,
    validation: Sequence[tuple[str, Labelled]],
) -> dict[str, Any]:
    """The run's own line of the records, but for what the machine adds."""
    name = f"{model_name(job.model)} on {task.name}"
    return {
        "kind": "run",
        "run": f"{name}/seed{seed}",
        "arm": name,
        "preset": model_name(job.model),
        "size": "",
        "seed": seed,
        "label": job.label,
        "task": {"name": task.name, "classes": list(classes), "metrics": list(task.metrics)},
        "train": asdict(job.train),
        "data": {
            "train": {"texts": len(training), "fingerprint": training.fingerprint},
            **{
                split: {"texts": len(found), "fingerprint": found.fingerprint}
                for split, found in validation
            },
        },
    }


def _run(
    job: FinetuneJob,
    task: Task,
    header: dict[str, Any],
    folder: Path,
    tokenizer: Any,
    data: tuple[Labelled, Sequence[tuple[str, Labelled]]],
    say: Callable[[str], None],
    lock: Lock,
) -> None:
    """One seed: train, measure, publish all at once."""
    seed, classes, size = header["seed"], header["task"]["classes"], job.train.batch_size
    torch.manual_seed(seed)
    model = load_classifier(
        job.model,
        classes,
        tokenizer=tokenizer,
        dropout=job.train.dropout,
        trust_remote_code=job.trust_remote_code,
    )
    limit = longest_text(model)
    if limit is not None and job.train.max_length > limit:
        raise ClearheadError(
            f"max_length is {job.train.max_length}, but the model has {limit} learned positions: "
            f"give --train.max-length {limit}"
        )
    model = model.to(best_device())
    training, validation = data
    batches = LabelledBatches(training, tokenizer, batch_size=size, seed=seed)
    result = finetune(model, batches, job.train, seed=seed, say=say)
    if result.stop_signal is not None:
        raise InterruptedTask(result)
    run = header["run"]
    lines = [header | describe(model, run, {}) | {"model": model.config.to_diff_dict()}]
    lines += [{"kind": "step", "run": run, **line} for line in result.steps]
    seconds = result.steps[-1]["seconds"]
    lines.append({"kind": "measure", "run": run, "metric": "train_seconds", "value": seconds})
    for split, found in validation:
        answers = predict(
            model, LabelledBatches(found, tokenizer, batch_size=size, seed=None).epoch()
        )
        for line in scores(answers, found.labels, training.labels, task):
            lines.append({"kind": "measure", "run": run, "split": split, **line})
            say(f"seed {seed}, {split}: {line['metric']} {line['value']:.4f}")
    lock.check()
    with publish_folder(folder) as temporary:
        save_pretrained(model, tokenizer, temporary)
        write_text(temporary / RECORDS, "".join(map(as_line, lines)))
        manifest.seal(temporary)


def scores(
    answers: np.ndarray, labels: Sequence[float], training: Sequence[float], task: Task
) -> list[dict[str, Any]]:
    """The task's metrics, and what always answering with the commonest training label gives.

    For a regression the mean takes its place, which has no correlation with anything.
    """
    lines = []
    for name in task.metrics:
        lines.append({"metric": name, "value": METRICS[name](answers, labels)})
        if not task.regression:
            kinds, counts = np.unique(training, return_counts=True)
            constant = np.full(len(labels), kinds[counts.argmax()])
            value = METRICS[name](constant, labels)
            lines.append({"metric": f"{name}, commonest class", "value": value})
    return lines


def _check_same(path: Path, header: dict[str, Any]) -> None:
    """Refuse a folder whose finished seed is damaged, or was made with other settings."""
    manifest.verify_model(path.parent)
    runs = load(path).runs
    if len(runs) != 1:
        raise ClearheadError(f"{path} is damaged: restore it, or delete {path.parent}")
    found, wanted = runs[0].header, json.loads(json.dumps(header))
    changed = [key for key in ("arm", "task", "train", "data") if found.get(key) != wanted[key]]
    if changed:
        raise ClearheadError(
            f"{path.parent} holds a run of another {' and '.join(changed)}: choose another output "
            "folder, or the settings of that run"
        )
