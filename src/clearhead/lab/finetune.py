"""Fine-tuning one checkpoint on one task with every seed, and its validation."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, LabelledBatches, labelled, readers
from clearhead.errors import ClearheadError
from clearhead.eval.classification import METRICS, predict
from clearhead.lab.configs import RECORDS, FinetuneJob
from clearhead.lab.runs import Trial, run_missing
from clearhead.lab.sweep_configs import short_names
from clearhead.measure.sweep import parameters_digest
from clearhead.models import ClearheadConfig, loading
from clearhead.models.inspection import require_positions
from clearhead.progress import Work
from clearhead.records import jsonl, manifest
from clearhead.records.files import hold_folder
from clearhead.records.identity import canonical, digest_of
from clearhead.records.loading import Store
from clearhead.records.runs import Line, Records
from clearhead.terminal import say
from clearhead.train import Progress, holds_run, make_trackers, precision, train_to_end
from clearhead.train.callbacks import METRICS as STEPS
from clearhead.train.checkpoint import FOLDER
from clearhead.train.run_dir import FREE_KEYS, describe, read_record, refuse_changes

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)


def run_finetune(job: FinetuneJob, *, work: Work | None = None) -> Records:
    """Fine-tune and measure with every seed, or go on; return the records of the output."""
    task = _Task(job)
    with hold_folder(job.output):
        trials = [task.trial(seed) for seed in job.seeds]
        return run_missing(trials, Store(job.output / RECORDS), "finetune", work)


class _Task:
    """A task's texts as the model reads them, and its classifier."""

    def __init__(self, job: FinetuneJob) -> None:
        self.job, self.task = job, job.resolved()
        cache = DataConfig().cache_folder
        sources: dict[str, Any] = {"train": self.task.train, **dict(self.task.validation)}
        revisions = {
            source: readers.pinned_revision(source, cache, say)
            for source in sources.values()
            if source.startswith(readers.HUB)
        }
        read = partial(labelled.read_rows, task=self.task, cache=cache, progress=say)
        rows = {split: read(source) for split, source in sources.items()}
        self.classes = labelled.classes_of(rows["train"], self.task)
        # Labels first: a wrong one is better known before a model is loaded.
        of = partial(labelled.labels_of, classes=self.classes, task=self.task)
        labels = {split: of(some) for split, some in rows.items()}
        with loading.explained(job.model, "tokenizer"):
            self.path = loading.resolved(job.model)
            trust = job.trust_remote_code
            self.tokenizer = loading.load_tokenizer(self.path, trust_remote_code=trust)
            if self.tokenizer.pad_token_id is None:
                self.tokenizer.pad_token = self.tokenizer.eos_token
        encode = partial(labelled.encode, tokenizer=self.tokenizer, length=job.train.max_length)
        self.texts = {split: encode(some, labels[split]) for split, some in rows.items()}
        torch.manual_seed(0)  # of the new head, which is in the hash too
        model = self.classifier()
        if not isinstance(model.config, ClearheadConfig):
            # Before a text, padding would move the learned positions of others, such as GPT-2's.
            self.tokenizer.padding_side = "right"
        train = {name: value for name, value in asdict(job.train).items() if name not in FREE_KEYS}
        # As it will be computed: records have no "auto".
        train["precision"] = precision.resolve(job.train.precision, loading.best_device())
        (name,), task = short_names([self.path]), self.task
        decisive = {
            "arm": f"{name} on {task.name}",
            "task": {"name": task.name, "classes": self.classes, "metrics": task.metrics},
            "train": train,
            "data": {
                split: {"texts": len(texts), "fingerprint": texts.fingerprint}
                for split, texts in self.texts.items()
            },
            "from": {"parameters": parameters_digest(model)},
        }
        self.cell = digest_of(canonical([*decisive.values()]))[:16]
        self.header = {"preset": name, "size": "", "label": job.label, **decisive}
        self.header |= {"revisions": revisions} if revisions else {}

    def classifier(self) -> Any:
        """The checkpoint as a model that classifies, its head drawn from PyTorch's generator unless
        it has one of that size; id2label has the names of the classes."""
        from transformers import AutoModelForSequenceClassification

        path, trust = self.path, self.job.trust_remote_code
        dropout = self.job.train.dropout
        manifest.verify_model(Path(path))
        with loading.explained(self.job.model, "classifier"):
            config = loading.load_config(path, trust_remote_code=trust)
            names = dict(enumerate(self.classes)) or {0: "score"}
            config.id2label = names
            config.label2id = {name: number for number, name in names.items()}
            config.problem_type = "single_label_classification" if self.classes else "regression"
            config.pad_token_id = self.tokenizer.pad_token_id
            if isinstance(config, ClearheadConfig):
                config.dropout = DROPOUT if dropout is None else dropout
            elif dropout is not None:
                raise ClearheadError("dropout is for clearhead models: set it in config.json")
            options: Any = {"trust_remote_code": trust, "config": config, "dtype": torch.float32}
            auto = AutoModelForSequenceClassification
            model = loading.pretrained(auto, path, head="new", **options)
        longest, advice = self.job.train.max_length, "give a smaller --train.max-length"
        require_positions(model, longest, advice, self.job.model)
        return model

    def trial(self, seed: int) -> Trial:
        """The run with a seed; other settings than those of a run in its folder are refused."""
        folder = self.job.output / f"seed{seed}"
        if holds_run(folder):
            now = {key: self.header[key] for key in ("task", "train", "from")}
            refuse_changes(folder, read_record(folder)["description"], now)
        header = {"run": f"{self.header['arm']}/seed{seed}", "seed": seed, **self.header}
        return Trial(f"seed {seed}", folder, self.cell, header, partial(self._rows, folder, header))

    def _rows(self, folder: Path, header: Line, work: Work) -> Iterator[Line]:
        """The lines of the training with their epoch, its time, and the task's metrics, for classes
        beside those of always answering with the commonest training label."""
        job, texts, called = self.job, self.texts, f"seed {header['seed']}"
        count, kinds = len(texts["train"]), len(self.classes) or "a number"
        say(f"{called}: {count:,} texts, {kinds} classes")
        torch.manual_seed(header["seed"])
        batches = partial(
            LabelledBatches, tokenizer=self.tokenizer, batch_size=job.train.batch_size
        )
        training = batches(texts["train"], seed=header["seed"])
        model, _ = train_to_end(
            self.classifier().to(loading.best_device()),
            training,
            job.train.run(training.per_epoch, header["seed"]),
            output=folder,
            tokenizer=self.tokenizer,
            callbacks=[Progress(work=work), *make_trackers(job.track)],
            description=header,
        )
        line: Line = {}
        for line in jsonl.steps(folder / STEPS):
            yield {**line, "epoch": (line["step"] - 1) // training.per_epoch + 1}
        yield {"metric": "train_seconds", "value": line.get("seconds")}
        values, counts = np.unique(texts["train"].labels, return_counts=True)
        for split, _ in self.task.validation:
            labels = texts[split].labels
            answers = {"": predict(model, batches(texts[split], seed=None).epoch())}
            if not self.task.regression:
                answers[", commonest class"] = np.full(len(labels), values[counts.argmax()])
            for name in self.task.metrics:
                for whose, given in answers.items():
                    value = METRICS[name](given, labels)
                    say(f"{called}, {split}: {name}{whose} {value:.4f}")
                    yield {"split": split, "metric": name + whose, "value": value}
        header |= {**describe(model, header["run"], {}), "model": model.config.to_diff_dict()}
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
