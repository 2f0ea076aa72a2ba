"""A comparison: every arm is trained on the same tokens in the same order and measured alike."""

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.data import Corpus, prepare, windows, with_mask_token
from clearhead.diagnose import HiddenStatistics, RotatedKurtosis, RowMeans
from clearhead.errors import ClearheadError
from clearhead.eval.perplexity_task import masked_loss
from clearhead.eval.sliding import lengths as perplexity_by_length
from clearhead.eval.sliding import perplexity
from clearhead.lab import runs
from clearhead.lab.configs import RECORDS, Arm, CompareConfig
from clearhead.lab.runs import Base, Trial, run_missing
from clearhead.models import plan
from clearhead.models.inspection import parameter_count, require_positions
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.probe import ByTile
from clearhead.probe import measure as measure_inside
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import hold_folder
from clearhead.records.loading import Store
from clearhead.records.provenance import KEYS
from clearhead.records.runs import Line, Records
from clearhead.terminal import say
from clearhead.train import DivergedError, TrainConfig, make_trackers, precision, train_to_end
from clearhead.train.callbacks import METRICS, LinesFile, Progress, StepMetrics
from clearhead.train.run_dir import read_record, refuse_changes, require_no_run
from clearhead.train.trainable import choose_parameters

UNTIMED = "the process that trained it was stopped before the measurements"
DIAGNOSED_WINDOWS = 32
TOKENS_IN_A_BATCH = 4096
MILESTONES = "milestones.jsonl"
WINDOWS = 16  # of a milestone
_OF_MILESTONES = (
    *("kurtosis", "kurtosis_rotated", "largest_activation"),
    *("first_token_argmax_share", "first_token_mass", "null_mass", "prefix_mass"),
)
# Of a run's header: what another request must have alike to take its records.
_SETTINGS = (
    *("size", "from", "model", "train", "lengths", "evaluation_tokens", "measure_every"),
    *("documents", "held_out"),
)


def folder_of(config: CompareConfig, arm: Arm, seed: int) -> Path:
    """The folder of a run."""
    return config.output / f"{arm.folder}-seed{seed}"


def compare(config: CompareConfig, *, work: Work | None = None) -> Records:
    """Train and measure every arm with every seed, or go on; return the records of the output. A
    run that diverges is recorded as such, and the others continue: in a sweep that is a result."""
    config.check()
    require_no_run(config.output)
    with hold_folder(config.output):
        store = Store(config.output / RECORDS)
        arms = _arms(config)
        trials = [arm.trial(seed, store.headers) for seed in config.seeds for arm in arms]
        done = run_missing(trials, store, "compare", work)
    for one in done.runs:
        if one.diverged:
            say(f"{one.arm}, seed {one.seed}: {one.header['diverged']}")
    if all(one.diverged for one in done.runs):
        raise DivergedError(f"no run stayed finite: {done.runs[0].header['diverged']}")
    return done


def _arms(config: CompareConfig) -> list["_Arm"]:
    """Every arm, on one text."""
    # The fingerprint of the data of a run that has begun in the output folder, or None.
    folders = (folder_of(config, *run) for run in itertools.product(config.arms, config.seeds))
    began = next(filter(None, map(runs.data_of, folders)), None)
    base = None
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        corpus = with_mask_token(corpus) if config.objective == "mlm" else corpus
    else:
        longest = max(arm.train.sequence_length for arm in config.arms)
        base = runs.open_base(config, longest, began)
        corpus = base.corpus
    corpus = corpus.for_tuning() if config.held_out == "training" else corpus
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        say(f"nothing is held out of {', '.join(unseen)}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    return [_Arm(arm, config, corpus, base) for arm in config.arms]


class _Arm:
    """An arm, the text of all, and the arm's model without weights."""

    def __init__(self, arm: Arm, config: CompareConfig, corpus: Corpus, base: Base | None) -> None:
        self.arm, self.config, self.corpus, self.base = arm, config, corpus, base
        try:
            if base is None:
                keys = runs.fitted(arm.preset, config.size, corpus, arm.train, **arm.model)
                with torch.device("meta"):
                    self.outline = runs.new_model(keys)
                require_positions(self.outline, arm.train.sequence_length, runs.SHORTER)
            else:
                self.outline = self.model()
                if remark := runs.resting_sinks(self.outline, arm.train):
                    say(f"{arm.name}: {remark}, in a comparison of arms with a null key or XSA")
                self.outline.to("meta")
                self.outline.tie_weights()
            model = copy.deepcopy(self.outline)
            choose_parameters(model, arm.train)
            build_optimizer(model, arm.train)
        except ClearheadError as error:
            raise ClearheadError(f"{arm.name}: {error}") from error

    def model(self) -> Any:
        """The model to train, drawn from PyTorch's generator or made from the base."""
        if self.base is None:
            return runs.new_model(copy.deepcopy(self.outline.config))
        return self.base.start(self.arm.preset, self.arm.model).model

    def trial(self, seed: int, known: Mapping[str, Line]) -> Trial:
        """The run with a seed; refuses other settings than those of the `known` runs' headers."""
        arm, config, base = self.arm, self.config, self.base
        # As it will be computed: the header of a record has no "auto".
        resolved = precision.resolve(arm.train.precision, best_device())
        settings = replace(arm.train, seed=seed, precision=resolved)
        parameters = parameter_count(self.outline)
        tables = [x for x in self.outline.modules() if isinstance(x, nn.Embedding)]
        tables.append(self.outline.get_output_embeddings())
        embeddings = sum(weight.numel() for weight in {one.weight for one in tables})
        # Documents of a validation window are apart if all training keeps them so.
        documents = "apart" if all(x.train.document_masks for x in config.arms) else "together"
        every = math.ceil(config.measure_every * settings.steps / settings.log_every)
        header = {
            "kind": "run",
            "run": f"{arm.name}/seed{seed}",
            "arm": arm.name,
            "preset": arm.preset,
            "changes": arm.changes,
            "size": config.size if base is None else "",
            "from": base and base.origin,
            "seed": seed,
            "label": config.label,
            "model": self.outline.config.to_diff_dict(),
            "train": asdict(settings),
            "data": self.corpus.describe(),
            "parameters": parameters,
            "non_embedding_parameters": parameters - embeddings,
            "objective": config.objective,
            "lengths": [multiple * arm.train.sequence_length for multiple in config.lengths],
            "evaluation_tokens": config.evaluation_tokens,
            "measure_every": every * settings.log_every,
            "documents": documents,
            "held_out": config.held_out,
        }
        if base is None:
            counts = plan(self.outline.config, length=arm.train.sequence_length)
            header["forward_flops"] = counts.forward_flops
        for run, line in known.items():  # a page pools the seeds of an arm
            if run == header["run"] or all(line.get(x) == header[x] for x in ("arm", "label")):
                refuse_changes(config.output, _settings(line), _settings(header))
        if header["lengths"] or every:  # too short a text is refused now
            windows(self.corpus, length=settings.sequence_length, count=1)
        folder = folder_of(config, arm, seed)
        rows = partial(self._rows, folder, header, settings)
        return Trial(f"{arm.name}, seed {seed}", folder, "compared", header, rows)

    def _rows(
        self, folder: Path, header: Line, settings: TrainConfig, work: Work
    ) -> Iterator[Line]:
        every, lengths = header["measure_every"], header["lengths"]
        apart, masked = header["documents"] == "apart", header["objective"] == "mlm"
        callbacks = [Progress(work=work), *make_trackers(self.config.track)]
        if every:
            callbacks.append(Milestones(self.corpus, settings, every, apart))
        torch.manual_seed(settings.seed)
        model, result, diverged = self.model().to(best_device()), None, None
        try:
            model, result = train_to_end(
                model,
                runs.batches(self.corpus, settings, folder, masked=masked),
                settings,
                output=folder,
                tokenizer=self.corpus.tokenizer,
                callbacks=callbacks,
                description={"run": header["run"], "data": header["data"]},
            )
        except DivergedError as error:
            diverged = str(error)
        record = read_record(folder)
        header |= {key: record[key] for key in KEYS if key in record} | {"diverged": diverged}
        for line in jsonl.steps(folder / METRICS):
            yield line | {"kind": "step"}
        if every:
            yield from jsonl.steps(folder / MILESTONES)
        for metric in ("seconds", "tokens_per_second", "peak_memory_bytes"):
            value = getattr(result, metric, None)
            reason = {} if value is not None else {"reason": diverged or UNTIMED}
            metric = "train_seconds" if metric == "seconds" else metric
            yield {"metric": metric, "value": value, **reason}
        if diverged is not None:
            none = {"metric": "perplexity", "value": None, "reason": diverged}
            yield from ({**none, "length": length} for length in lengths)
        elif lengths:
            tokens, length = self.config.evaluation_tokens, settings.sequence_length
            read: Any = {"tokens": tokens, "documents_apart": apart}
            if masked:
                for size in lengths:
                    yield from masked_loss(model, self.corpus, length=size, **read)
            else:
                yield from perplexity_by_length(model, self.corpus, lengths=lengths, **read)
            count = min(DIAGNOSED_WINDOWS, max(1, tokens // length))
            texts = list(windows(self.corpus, length=length, count=count))
            batch_size = max(1, TOKENS_IN_A_BATCH // length)
            yield from _inside(model, texts, settings, batch_size=batch_size)


def _settings(header: Line) -> dict[str, Any]:
    settings = {key: header.get(key) for key in _SETTINGS}
    fingerprint = (header.get("data") or {}).get("fingerprint")
    settings["train"] = {**(header.get("train") or {}), "seed": None}
    return settings | {"data": {"fingerprint": fingerprint}}


def _inside(
    model: Any, texts: Sequence[torch.Tensor], settings: TrainConfig, *, batch_size: int
) -> list[Line]:
    """Attention and hidden states, in the model's own basis and in that of OrthoAdam's steps of the
    embedding's columns with this seed, in one pass."""
    kind, share = settings.rotation or "hadamard", settings.rotation_share or "parameter"
    rotated = RotatedKurtosis(model, kind=kind, share=share, seed=settings.seed)
    parts: Any = {"attention": [ByTile(weights=[RowMeans()])]}
    parts |= {"hidden": [HiddenStatistics(), rotated]}
    return measure_inside(model, texts, batch_size=batch_size, **parts)


class Milestones(LinesFile):
    """Loss (nats a token), outliers and attention to the first token, every few steps and after the
    last, on the same few validation windows; training finds its state as it was."""

    file = MILESTONES

    def __init__(self, corpus: Corpus, settings: TrainConfig, every: int, apart: bool) -> None:
        self.settings, self.every = settings, every
        self._texts = list(windows(corpus, length=settings.sequence_length, count=WINDOWS))
        self._tokenizer = corpus.tokenizer if apart else None

    def step(self, metrics: StepMetrics) -> None:
        """Measure at every `every`-th step, and at the last."""
        if metrics.step % self.every and metrics.step != self.run.steps:
            return
        model: Any = self.run.model
        length, size = self.settings.sequence_length, self.settings.batch_size
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            read = perplexity(model, self._texts, batch_size=size, tokenizer=self._tokenizer)
            lines = _inside(model, self._texts, self.settings, batch_size=size)
        pooled = [one for one in lines if "layer" not in one and one["metric"] in _OF_MILESTONES]
        common = {"kind": "measure", "run": self.run.name, "step": metrics.step}
        loss = {"metric": "loss", "value": read.loss, "length": length}
        self.write("".join(jsonl.encode({**common, **line}) for line in (loss, *pooled)))
