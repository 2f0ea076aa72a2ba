"""Fine-tuning one checkpoint on one task, with every seed, and asking it the validation texts.

OUTPUT/seedN/            a seed's model and its records, there only whole
OUTPUT/seedN-training/   its run folder (`clearhead.train.folder`), until then
OUTPUT/records.jsonl     the records of all finished seeds
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, Labelled, LabelledBatches, Task, labelled
from clearhead.errors import ClearheadError
from clearhead.eval import METRICS, predict
from clearhead.experiments.configs import RECORDS, FinetuneJob
from clearhead.models import ClearheadConfig
from clearhead.models.inspection import longest_text
from clearhead.models.loading import (
    best_device,
    explained,
    load_config,
    load_tokenizer,
    pretrained,
    resolved,
    without_bars,
)
from clearhead.records import jsonl, manifest
from clearhead.records.files import publish_folder, remove_leftovers, write_text
from clearhead.records.lock import hold_folder
from clearhead.report.records import Records, as_line, load
from clearhead.train import (
    Callback,
    FinetuneConfig,
    InterruptedRun,
    Run,
    StepMetrics,
    holds_run,
    is_finished,
    train,
)
from clearhead.train.callbacks.metrics import FILE as STEPS
from clearhead.train.checkpoint import save_pretrained
from clearhead.train.folder import FREE_KEYS, describe, read_record

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)


def run_finetune(job: FinetuneJob, *, say: Callable[[str], None]) -> Records:
    """Fine-tune and measure with every seed; return the records, also in OUTPUT/records.jsonl.

    A seed that was stopped goes on from its newest checkpoint, a finished one is kept.

    Raises:
        ClearheadError: for a model, rows, labels or settings that do not work.
        InterruptedRun: after SIGINT or SIGTERM, once the seed at hand has saved.
    """
    texts = _read(job, say)
    with hold_folder(job.output) as lock:
        remove_leftovers(job.output)
        done = []
        for number in job.seeds:
            seed = _Seed(job, texts, number, say)
            if (seed.folder / RECORDS).exists():
                seed.check_finished()
                say(f"seed {number}: already done")
            else:
                kinds = len(texts.classes) or "a number"
                say(f"seed {number}: {len(texts.training):,} texts, {kinds} classes")
                model = seed.trained()
                lines = seed.records(model)
                lock.check()  # measuring takes its time
                with publish_folder(seed.folder) as temporary:
                    save_pretrained(model, texts.tokenizer, temporary)
                    write_text(temporary / RECORDS, "".join(map(as_line, lines)))
                    manifest.seal(temporary)
            if holds_run(seed.run):
                shutil.rmtree(seed.run)
            done.append(seed.folder / RECORDS)
            text = "".join(path.read_bytes().decode() for path in done)
            write_text(job.output / RECORDS, text)
        return load(job.output / RECORDS)


def model_name(name: str) -> str:
    """What a checkpoint is called in records: its run's folder."""
    path = Path(resolved(name))
    return path.parent.name if path.name == "final" and path.parent.name else path.name


@dataclass(frozen=True, kw_only=True)
class _Texts:
    """A task's texts as the model reads them."""

    task: Task
    classes: tuple[str, ...]
    tokenizer: Any
    training: Labelled
    validation: list[tuple[str, Labelled]]


def _read(job: FinetuneJob, say: Callable[[str], None]) -> _Texts:
    task, name = job.resolved(), resolved(job.model)
    cache = DataConfig(cache=job.cache).cache_folder
    assert task.train is not None
    sources = [("train", task.train), *task.validation]
    rows = [labelled.read_rows(source, task, cache=cache, progress=say) for _, source in sources]
    classes = labelled.classes_of(rows[0], task)
    # Labels first: a wrong one is better known before a model is loaded.
    labels = [labelled.labels_of(found, classes, task) for found in rows]
    with explained(job.model, "tokenizer"):
        tokenizer = load_tokenizer(name, trust_remote_code=job.trust_remote_code)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    length = job.train.max_length
    training, *validation = (
        labelled.encode(found, known, tokenizer, length=length)
        for found, known in zip(rows, labels, strict=True)
    )
    splits = [split for split, _ in task.validation]
    return _Texts(
        task=task,
        classes=classes,
        tokenizer=tokenizer,
        training=training,
        validation=list(zip(splits, validation, strict=True)),
    )


class _Seed:
    """One seed: its folders, its training and its records."""

    def __init__(
        self, job: FinetuneJob, texts: _Texts, seed: int, say: Callable[[str], None]
    ) -> None:
        self.job, self.texts, self.seed, self.say = job, texts, seed, say
        self.folder = job.output / f"seed{seed}"
        self.run = job.output / f"seed{seed}-training"
        self.batches = LabelledBatches(
            texts.training, texts.tokenizer, batch_size=job.train.batch_size, seed=seed
        )
        model, task = model_name(job.model), texts.task
        name = f"{model} on {task.name}"
        metrics, classes = list(task.metrics), list(texts.classes)
        # The run's own line of the records, but for what the machine adds.
        self.header: dict[str, Any] = {
            "kind": "run",
            "run": f"{name}/seed{seed}",
            "arm": name,
            "preset": model,
            "size": "",
            "seed": seed,
            "label": job.label,
            "task": {"name": task.name, "classes": classes, "metrics": metrics},
            "train": _settings(job.train),
            "data": {
                split: {"texts": len(found), "fingerprint": found.fingerprint}
                for split, found in (("train", texts.training), *texts.validation)
            },
        }

    def check_finished(self) -> None:
        """Refuse a finished seed that is damaged, or was made with other settings."""
        manifest.verify_model(self.folder)
        self._check_same(self.folder, jsonl.first(self.folder / RECORDS) or {})

    def _check_same(self, folder: Path, found: dict[str, Any]) -> None:
        # Settings that are newer than the run had their defaults.
        found = {**found, "train": {**_settings(FinetuneConfig()), **found.get("train", {})}}
        found, wanted = json.loads(json.dumps([found, self.header]))
        changed = [key for key in ("arm", "task", "train", "data") if found.get(key) != wanted[key]]
        if changed:
            raise ClearheadError(
                f"{folder} holds a run of another {' and '.join(changed)}: choose another output "
                "folder, or the settings of that run"
            )

    def trained(self) -> Any:
        """The model after all steps; those that remain are done.

        Raises:
            InterruptedRun: after SIGINT or SIGTERM.
        """
        begun = holds_run(self.run)
        if begun:
            self._check_same(self.run, read_record(self.run)["description"])
        torch.manual_seed(self.seed)
        finished = is_finished(self.run)  # trained, but stopped before it was measured
        name = str(self.run) if finished else self.job.model
        model = _classifier(name, self.job, self.texts).to(best_device())
        if finished:
            return model
        result = train(
            model,
            self.batches,
            self.job.train.run(self.batches.per_epoch, self.seed),
            output=self.run,
            tokenizer=self.texts.tokenizer,
            resume=begun,
            callbacks=[_Epochs(self.batches.per_epoch, self.say)],
            description=self.header,
        )
        if result.stop_signal is not None:
            raise InterruptedRun(result)
        return model

    def records(self, model: Any) -> list[dict[str, Any]]:
        """The lines about the seed: settings, steps, and what the model answers."""
        name, texts = self.header["run"], self.texts
        lines = [self.header | describe(model, name, {}) | {"model": model.config.to_diff_dict()}]
        for line in jsonl.salvage(self.run / STEPS):
            del line["tokens"], line["tokens_per_second"]  # texts are not as long as they may be
            lines.append({**line, "epoch": (line["step"] - 1) // self.batches.per_epoch + 1})
        seconds = lines[-1]["seconds"]
        lines.append({"kind": "measure", "run": name, "metric": "train_seconds", "value": seconds})
        for split, found in texts.validation:
            size = self.job.train.batch_size
            batches = LabelledBatches(found, texts.tokenizer, batch_size=size, seed=None)
            answers = predict(model, batches.epoch())
            for line in _scores(answers, found.labels, texts.training.labels, texts.task):
                lines.append({"kind": "measure", "run": name, "split": split, **line})
                self.say(f"seed {self.seed}, {split}: {line['metric']} {line['value']:.4f}")
        return lines


def _settings(config: FinetuneConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in FREE_KEYS}


class _Epochs(Callback):
    """Says the mean loss of every epoch."""

    def __init__(self, per_epoch: int, say: Callable[[str], None]) -> None:
        self._per_epoch = per_epoch
        self._say = say

    def start(self, run: Run) -> None:
        self._run = run
        if run.first_step:
            self._say(f"going on from step {run.first_step} of {run.steps}")

    def step(self, metrics: StepMetrics) -> None:
        epoch, rest = divmod(metrics.step, self._per_epoch)
        if rest:
            return
        first = metrics.step - self._per_epoch
        steps = jsonl.salvage(self._run.output / STEPS)  # some may be of a process before
        loss = np.mean([line["loss"] for line in steps if line["step"] > first])
        self._say(
            f"epoch {epoch} of {self._run.steps // self._per_epoch}: training loss {loss:.4f}, "
            f"{metrics.seconds:.0f} s"
        )


def _classifier(name: str, job: FinetuneJob, texts: _Texts) -> Any:
    """A model that classifies, its head new unless the checkpoint has one of that size.

    The checkpoint is a causal model's, a masked one's, a classifier's, or any encoder's that
    transformers knows. A new head is drawn from PyTorch's generator. The model keeps the names of
    the classes as id2label.

    Raises:
        ClearheadError: where there is no such model, weights of its trunk are missing, `dropout`
            is for one that is not ours, or texts may be longer than it can read.
    """
    from transformers import AutoModelForSequenceClassification

    path, trust = resolved(name), job.trust_remote_code
    manifest.verify_model(Path(path))
    with without_bars(), explained(name, "classifier"):
        config = load_config(path, trust_remote_code=trust)
        names = dict(enumerate(texts.classes)) or {0: "score"}
        config.id2label = names
        config.label2id = {name: number for number, name in names.items()}
        config.problem_type = "single_label_classification" if texts.classes else "regression"
        config.pad_token_id = texts.tokenizer.pad_token_id
        dropout = job.train.dropout
        if isinstance(config, ClearheadConfig):
            config.dropout = DROPOUT if dropout is None else dropout
        elif dropout is not None:
            raise ClearheadError(
                f"dropout={dropout} is for clearhead models; {config.model_type} has settings of "
                "its own: leave it out, and set those in the checkpoint's config.json"
            )
        model = pretrained(
            AutoModelForSequenceClassification,
            path,
            head="new",
            trust_remote_code=trust,
            config=config,
            dtype=torch.float32,
        )
    limit = longest_text(model)
    if limit is not None and job.train.max_length > limit:
        raise ClearheadError(
            f"max_length is {job.train.max_length}, but the model has {limit} learned positions: "
            f"give --train.max-length {limit}"
        )
    return model


def _scores(
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
