"""Fine-tuning one checkpoint on one task with every seed, and its validation.

OUTPUT/seedN/           a seed's run folder (`clearhead.train.run_dir`); its model is in seedN/final
OUTPUT/records.jsonl    the records of all finished seeds
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, LabelledBatches, hub, labelled
from clearhead.errors import ClearheadError
from clearhead.eval import METRICS, predict
from clearhead.lab.configs import RECORDS, FinetuneJob
from clearhead.lab.run_setup import check_length
from clearhead.measure.sweep import parameters_digest
from clearhead.models import ClearheadConfig
from clearhead.models.loading import (
    best_device,
    explained,
    load_config,
    load_tokenizer,
    pretrained,
    resolved,
)
from clearhead.progress import Work
from clearhead.records import jsonl, manifest
from clearhead.records.identity import canonical, digest_of
from clearhead.records.loading import Store
from clearhead.records.lock import hold_folder
from clearhead.records.runs import Records
from clearhead.terminal import say
from clearhead.train import Progress, holds_run, make_trackers, precision, train_to_end
from clearhead.train.callbacks import METRICS as STEPS
from clearhead.train.checkpoint import FOLDER
from clearhead.train.run_dir import FREE_KEYS, describe, is_finished, read_record, refuse_changes

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)
_DECISIVE = ("arm", "task", "train", "data", "from")  # of a header: what decides the results


def run_finetune(job: FinetuneJob, *, work: Work | None = None) -> Records:
    """Fine-tune and measure with every seed; return the records, also in OUTPUT/records.jsonl.

    A stopped seed resumes from its newest checkpoint, a finished one is not run again. `work` shows
    the current seed and its progress, one unit for each seed.

    Raises:
        ClearheadError: for a model, rows, labels or settings that do not work.
        InterruptedRun: after SIGINT or SIGTERM, once the current seed has saved.
    """
    work = Work(say=say) if work is None else work
    task = _Task(job, work)
    with hold_folder(job.output):
        store = Store(job.output / RECORDS)
        work.start(len(job.seeds))
        for seed in job.seeds:
            header, folder = task.header(seed), job.output / f"seed{seed}"
            cell = digest_of(canonical([header[key] for key in _DECISIVE]))[:16]
            if store.has(cell, header) and is_finished(folder):
                work.skip()
                say(f"seed {seed}: already done")
                continue
            work.begin(f"seed {seed}")
            model = task.trained(seed, header, folder)
            rows = [*task.steps(folder), *task.measures(model, seed)]
            header |= describe(model, header["run"], {}) | {"model": model.config.to_diff_dict()}
            store.add(cell, header, rows, task="finetune")
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
            work.end()
        return store.records()


class _Task:
    """A task's texts as the model reads them, its classifier, and its measures."""

    def __init__(self, job: FinetuneJob, work: Work) -> None:
        self.job, self.work, self.task = job, work, job.resolved()
        cache = DataConfig(cache=job.cache).cache_folder
        sources: dict[str, Any] = {"train": self.task.train, **dict(self.task.validation)}
        hubs = filter(hub.is_hub, sources.values())
        self.revisions = {source: hub.pinned_revision(source, cache, say) for source in hubs}
        read = partial(labelled.read_rows, task=self.task, cache=cache, progress=say)
        rows = {split: read(source) for split, source in sources.items()}
        self.classes = labelled.classes_of(rows["train"], self.task)
        # Labels first: a wrong one is better known before a model is loaded.
        labels = {
            split: labelled.labels_of(found, self.classes, self.task)
            for split, found in rows.items()
        }
        with explained(job.model, "tokenizer"):
            self.path = resolved(job.model)
            self.tokenizer = load_tokenizer(self.path, trust_remote_code=job.trust_remote_code)
            if self.tokenizer.pad_token_id is None:
                self.tokenizer.pad_token = self.tokenizer.eos_token
        encode = partial(labelled.encode, tokenizer=self.tokenizer, length=job.train.max_length)
        self.texts = {split: encode(found, labels[split]) for split, found in rows.items()}
        torch.manual_seed(0)  # of the new head, which is in the hash too
        model = self.classifier()
        self.start = {"parameters": parameters_digest(model)}
        if not isinstance(model.config, ClearheadConfig):
            # Before a text, padding would move the learned positions of others, such as GPT-2's.
            self.tokenizer.padding_side = "right"

    def batches(self, split: str, seed: int | None = None) -> LabelledBatches:
        """Texts in the order of a seed, or as they stand."""
        size = self.job.train.batch_size
        return LabelledBatches(self.texts[split], self.tokenizer, batch_size=size, seed=seed)

    def classifier(self) -> Any:
        """The checkpoint as a model that classifies, its head drawn from PyTorch's generator unless
        it has one of that size; id2label has the names of the classes.

        Raises:
            ClearheadError: where there is no such model, weights of its trunk are missing,
                `dropout` is for one that is not ours, or texts may be longer than it can read.
        """
        from transformers import AutoModelForSequenceClassification

        path, trust = self.path, self.job.trust_remote_code
        dropout = self.job.train.dropout
        manifest.verify_model(Path(path))
        with explained(self.job.model, "classifier"):
            config = load_config(path, trust_remote_code=trust)
            names = dict(enumerate(self.classes)) or {0: "score"}
            config.id2label = names
            config.label2id = {name: number for number, name in names.items()}
            config.problem_type = "single_label_classification" if self.classes else "regression"
            config.pad_token_id = self.tokenizer.pad_token_id
            if isinstance(config, ClearheadConfig):
                config.dropout = DROPOUT if dropout is None else dropout
            elif dropout is not None:
                raise ClearheadError(
                    f"dropout={dropout} is for clearhead models; {config.model_type} has settings "
                    "of its own: leave it out, and set those in the checkpoint's config.json"
                )
            options: Any = {"trust_remote_code": trust, "config": config, "dtype": torch.float32}
            model = pretrained(AutoModelForSequenceClassification, path, head="new", **options)
        check_length(model, self.job.model, self.job.train.max_length, "max-length")
        return model

    def measures(self, model: Any, seed: int) -> Iterator[dict[str, Any]]:
        """The task's metrics, and what always answering with the commonest training label gives.

        For a regression the mean takes its place, which has no correlation with anything.
        """
        kinds, counts = np.unique(self.texts["train"].labels, return_counts=True)
        for split, _ in self.task.validation:
            labels = self.texts[split].labels
            answers = {"": predict(model, self.batches(split).epoch())}
            if not self.task.regression:
                answers[", commonest class"] = np.full(len(labels), kinds[counts.argmax()])
            for name in self.task.metrics:
                for whose, given in answers.items():
                    value = METRICS[name](given, labels)
                    say(f"seed {seed}, {split}: {name}{whose} {value:.4f}")
                    yield {"split": split, "metric": name + whose, "value": value}

    def header(self, seed: int) -> dict[str, Any]:
        """The line of a seed's run."""
        job, folder = self.job, Path(self.path)
        if folder.name == "final" and folder.parent.name:
            folder = folder.parent
        preset = folder.name
        arm = f"{preset} on {self.task.name}"
        task = {"name": self.task.name, "classes": self.classes, "metrics": self.task.metrics}
        train = {name: value for name, value in asdict(job.train).items() if name not in FREE_KEYS}
        # As it will be computed: records have no "auto".
        train["precision"] = precision.resolve(job.train.precision, best_device())
        return {
            "run": f"{arm}/seed{seed}",
            "arm": arm,
            "preset": preset,
            "size": "",
            "seed": seed,
            "label": job.label,
            "task": task,
            "from": self.start,
            "train": train,
            "data": {
                split: {"texts": len(found), "fingerprint": found.fingerprint}
                for split, found in self.texts.items()
            },
            **({"revisions": self.revisions} if self.revisions else {}),
        }

    def trained(self, seed: int, header: dict[str, Any], folder: Path) -> Any:
        """The model of a seed after all steps; raises InterruptedRun after SIGINT or SIGTERM."""
        if holds_run(folder):
            begun = read_record(folder)["description"]
            refuse_changes(folder, begun, {key: header[key] for key in ("task", "train", "from")})
        count, kinds = len(self.texts["train"]), len(self.classes) or "a number"
        say(f"seed {seed}: {count:,} texts, {kinds} classes")
        torch.manual_seed(seed)
        batches = self.batches("train", seed)
        model, _ = train_to_end(
            self.classifier().to(best_device()),
            batches,
            self.job.train.run(batches.per_epoch, seed),
            output=folder,
            tokenizer=self.tokenizer,
            callbacks=[Progress(work=self.work), *make_trackers(self.job.track)],
            description=header,
        )
        return model

    def steps(self, folder: Path) -> Iterator[dict[str, Any]]:
        """The lines of a training, with their epoch, and how long it took."""
        per_epoch = self.batches("train").per_epoch
        line: dict[str, Any] = {}
        for line in jsonl.steps(folder / STEPS):
            yield {**line, "epoch": (line["step"] - 1) // per_epoch + 1}
        yield {"metric": "train_seconds", "value": line.get("seconds")}
