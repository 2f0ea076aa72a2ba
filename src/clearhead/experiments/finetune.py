"""Fine-tuning one checkpoint on one task, with every seed, and asking it the validation texts.

OUTPUT/seedN/            a seed's model and its records, there only whole
OUTPUT/seedN-training/   its run folder (`clearhead.train.run_dir`), until then
OUTPUT/records.jsonl     the records of all finished seeds
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.data import DataConfig, LabelledBatches, hub, labelled
from clearhead.errors import ClearheadError, require_extras
from clearhead.eval import METRICS, predict
from clearhead.experiments.configs import RECORDS, FinetuneJob
from clearhead.measure.task import parameters_digest
from clearhead.models import ClearheadConfig
from clearhead.models.inspection import longest_text
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
from clearhead.records.files import publish_folder, write_text
from clearhead.records.loading import as_line, load
from clearhead.records.lock import hold_folder
from clearhead.records.runs import Records
from clearhead.train import (
    Callback,
    FinetuneConfig,
    Progress,
    Run,
    StepMetrics,
    holds_run,
    make_trackers,
    precision,
    train_to_end,
)
from clearhead.train.callbacks import METRICS as STEPS
from clearhead.train.checkpoint import save_pretrained
from clearhead.train.run_dir import FREE_KEYS, RUN_FILE, describe, read_record, refuse_changes

DROPOUT = 0.1  # of SAS's fine-tuning (arXiv 2311.01906, D.2)
HELD_OUT = "training rows held out"  # a split, in records


def run_finetune(
    job: FinetuneJob, *, say: Callable[[str], None], work: Work | None = None
) -> Records:
    """Fine-tune and measure with every seed; return the records, also in OUTPUT/records.jsonl.

    A seed that was stopped goes on from its newest checkpoint, a finished one is kept.

    Args:
        work: shows which seed is at hand and how far it is, a unit a seed.

    Raises:
        ClearheadError: for a model, rows, labels or settings that do not work.
        InterruptedRun: after SIGINT or SIGTERM, once the seed at hand has saved.
    """
    work = Work(say=say) if work is None else work
    require_extras(job)
    task = _Task(job, say, work)
    with hold_folder(job.output):
        text = ""
        work.start(len(job.seeds))
        for number in job.seeds:
            seed = _Seed(task, number)
            if (seed.folder / RECORDS).exists():
                seed.check_finished()
                work.skip()
                say(f"seed {number}: already done")
            else:
                work.begin(f"seed {number}")
                model = seed.trained()
                lines = [seed.header, *seed.steps(), *task.measures(model, number)]
                lines[0] |= describe(model, seed.name, {}) | {"model": model.config.to_diff_dict()}
                with publish_folder(seed.folder) as temporary:
                    save_pretrained(model, task.tokenizer, temporary)
                    found = "".join(as_line({**line, "run": seed.name}) for line in lines)
                    write_text(temporary / RECORDS, found)
                    manifest.seal(temporary)
                work.end()
            if holds_run(seed.run):
                shutil.rmtree(seed.run)
            text += (seed.folder / RECORDS).read_bytes().decode()
            write_text(job.output / RECORDS, text)
        return load(job.output / RECORDS)


def model_name(name: str) -> str:
    """The name of a checkpoint in records: its run's folder."""
    path = Path(resolved(name))
    return path.parent.name if path.name == "final" and path.parent.name else path.name


class _Task:
    """A task's texts as the model reads them, its classifier, and its measures."""

    def __init__(self, job: FinetuneJob, say: Callable[[str], None], work: Work) -> None:
        self.job, self.say, self.work, self.task = job, say, work, job.resolved()
        cache = DataConfig(cache=job.cache).cache_folder
        assert self.task.train is not None
        measured = {} if job.tunes else dict(self.task.validation)
        sources = {"train": self.task.train, **measured}
        self.revisions = {
            source: hub.pinned_revision(source, cache, say)
            for source in sources.values()
            if hub.is_hub(source)
        }
        rows = {
            split: labelled.read_rows(source, self.task, cache=cache, progress=say)
            for split, source in sources.items()
        }
        self.classes = labelled.classes_of(rows["train"], self.task)
        if job.tunes:
            rows["train"], rows[HELD_OUT] = labelled.without_tenth(rows["train"])
        self.measured = [split for split in rows if split != "train"]
        # Labels first: a wrong one is better known before a model is loaded.
        labels = {
            s: labelled.labels_of(found, self.classes, self.task) for s, found in rows.items()
        }
        with explained(job.model, "tokenizer"):
            name, trust = resolved(job.model), job.trust_remote_code
            self.tokenizer = load_tokenizer(name, trust_remote_code=trust)
            if self.tokenizer.pad_token_id is None:
                self.tokenizer.pad_token = self.tokenizer.eos_token
        length = job.train.max_length
        self.texts = {
            split: labelled.encode(found, labels[split], self.tokenizer, length=length)
            for split, found in rows.items()
        }
        torch.manual_seed(0)  # of the new head, which is in the hash too
        model = self.classifier(job.model)
        self.start = {"parameters": parameters_digest(model)}
        if not isinstance(model.config, ClearheadConfig):
            # Before a text, padding would move the learned positions of others, such as GPT-2's.
            self.tokenizer.padding_side = "right"

    def batches(self, split: str, seed: int | None = None) -> LabelledBatches:
        """Texts in the order of a seed, or as they stand."""
        size = self.job.train.batch_size
        return LabelledBatches(self.texts[split], self.tokenizer, batch_size=size, seed=seed)

    def classifier(self, name: str) -> Any:
        """A model that classifies, its head new unless the checkpoint has one of that size.

        The checkpoint is a causal model's, a masked one's, a classifier's, or any encoder's that
        transformers knows. A new head is drawn from PyTorch's generator. The model keeps the names
        of the classes as id2label.

        Raises:
            ClearheadError: where there is no such model, weights of its trunk are missing,
                `dropout` is for one that is not ours, or texts may be longer than it can read.
        """
        from transformers import AutoModelForSequenceClassification

        path, trust = resolved(name), self.job.trust_remote_code
        dropout, length = self.job.train.dropout, self.job.train.max_length
        manifest.verify_model(Path(path))
        with explained(name, "classifier"):
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
            model = pretrained(
                AutoModelForSequenceClassification,
                path,
                head="new",
                trust_remote_code=trust,
                config=config,
                dtype=torch.float32,
            )
        limit = longest_text(model)
        if limit is not None and length > limit:
            raise ClearheadError(
                f"max_length is {length}, but the model has {limit} learned positions: "
                f"give --train.max-length {limit}"
            )
        return model

    def measures(self, model: Any, seed: int) -> Iterator[dict[str, Any]]:
        """The task's metrics, and what always answering with the commonest training label gives.

        For a regression the mean takes its place, which has no correlation with anything.
        """
        kinds, counts = np.unique(self.texts["train"].labels, return_counts=True)
        for split in self.measured:
            labels = self.texts[split].labels
            answers = {"": predict(model, self.batches(split).epoch())}
            if not self.task.regression:
                answers[", commonest class"] = np.full(len(labels), kinds[counts.argmax()])
            for name in self.task.metrics:
                for whose, given in answers.items():
                    value = METRICS[name](given, labels)
                    self.say(f"seed {seed}, {split}: {name}{whose} {value:.4f}")
                    yield {
                        "kind": "measure",
                        "split": split,
                        "metric": name + whose,
                        "value": value,
                    }


class _Seed:
    """One seed: its folders and its training."""

    def __init__(self, task: _Task, seed: int) -> None:
        self.task, self.seed, job = task, seed, task.job
        self.folder = job.output / f"seed{seed}"
        self.run = job.output / f"seed{seed}-training"
        self.batches = task.batches("train", seed)
        preset, known = model_name(job.model), task.task
        arm = f"{preset} on {known.name}"
        self.name = f"{arm}/seed{seed}"
        self.header: dict[str, Any] = {
            "kind": "run",
            "run": self.name,
            "arm": arm,
            "preset": preset,
            "size": "",
            "seed": seed,
            "label": job.label,
            "task": {"name": known.name, "classes": task.classes, "metrics": known.metrics},
            "from": task.start,
            "train": _settings(job.train),
            "data": {
                split: {"texts": len(found), "fingerprint": found.fingerprint}
                for split, found in task.texts.items()
            },
            **({"revisions": task.revisions} if task.revisions else {}),
        }

    def check_finished(self) -> None:
        """Refuse a finished seed that is damaged, or was made with other settings or weights."""
        manifest.verify_model(self.folder)
        asked = jsonl.first(self.folder / RECORDS) or {}
        wanted = {key: self.header[key] for key in ("arm", "task", "train", "data", "from")}
        refuse_changes(self.folder, asked, wanted)

    def trained(self) -> Any:
        """The model after all steps; those that remain are done.

        Raises:
            InterruptedRun: after SIGINT or SIGTERM.
        """
        task = self.task
        if (self.run / RUN_FILE).exists():
            begun = read_record(self.run)["description"]
            refuse_changes(self.run, begun, {"from": task.start})
        count, kinds = len(task.texts["train"]), len(task.classes) or "a number"
        task.say(f"seed {self.seed}: {count:,} texts, {kinds} classes")
        torch.manual_seed(self.seed)
        model, _ = train_to_end(
            task.classifier(task.job.model).to(best_device()),
            self.batches,
            task.job.train.run(self.batches.per_epoch, self.seed),
            output=self.run,
            tokenizer=task.tokenizer,
            callbacks=[
                Progress(work=task.work),
                _Epochs(self.batches.per_epoch, task.say),
                *make_trackers(task.job.track),
            ],
            description=self.header,
        )
        return model

    def steps(self) -> Iterator[dict[str, Any]]:
        """The lines of the training, with their epoch, and how long it took."""
        line: dict[str, Any] = {}
        for line in jsonl.steps(self.run / STEPS):
            del line["tokens"], line["tokens_per_second"]  # texts are not as long as they may be
            yield {**line, "epoch": (line["step"] - 1) // self.batches.per_epoch + 1}
        yield {"kind": "measure", "metric": "train_seconds", "value": line.get("seconds")}


def _settings(config: FinetuneConfig) -> dict[str, Any]:
    """Settings that decide the result, the precision as it will be computed."""
    found = {name: value for name, value in asdict(config).items() if name not in FREE_KEYS}
    return found | {"precision": precision.resolve(config.precision, best_device())}


class _Epochs(Callback):
    """Says the mean loss of every epoch."""

    def __init__(self, per_epoch: int, say: Callable[[str], None]) -> None:
        self._per_epoch = per_epoch
        self._say = say

    def start(self, run: Run) -> None:
        self._run = run

    def step(self, metrics: StepMetrics) -> None:
        epoch, rest = divmod(metrics.step, self._per_epoch)
        if rest:
            return
        first = metrics.step - self._per_epoch
        steps = jsonl.steps(self._run.output / STEPS)  # some may be of a process before
        loss = np.mean([line["loss"] for line in steps if line["step"] > first])
        self._say(
            f"epoch {epoch} of {self._run.steps // self._per_epoch}: training loss {loss:.4f}, "
            f"{metrics.seconds:.0f} s"
        )
