"""Fine-tuning one checkpoint on one task, with every seed, and asking it the validation texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, Labelled, LabelledBatches, Task, labelled
from clearhead.errors import ClearheadError
from clearhead.eval import METRICS, predict
from clearhead.experiments.classifiers import load_classifier, load_tokenizer
from clearhead.experiments.configs import RECORDS, FinetuneJob
from clearhead.models.inspection import longest_text
from clearhead.models.loading import best_device, resolved
from clearhead.records import manifest
from clearhead.records.files import publish_folder, remove_leftovers, write_text
from clearhead.records.loading import as_line, load
from clearhead.records.lock import Lock, hold_folder
from clearhead.records.runs import Records
from clearhead.train import Finetuned, finetune
from clearhead.train.checkpoint import save_pretrained
from clearhead.train.folder import describe


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
