"""A comparison: every arm is trained on the same tokens in the same order and measured alike."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from clearhead.lab.configs import Arm, CompareConfig, milestone_steps
from clearhead.lab.runs import Base, run_missing
from clearhead.models import plan
from clearhead.models.inspection import parameter_count, require_positions
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.probe import ByTile
from clearhead.probe import measure as measure_inside
from clearhead.progress import Work
from clearhead.records import jsonl
from clearhead.records.files import hold_folder
from clearhead.records.provenance import KEYS
from clearhead.records.runs import Line, Records
from clearhead.terminal import say
from clearhead.train import DivergedError, TrainConfig, make_trackers, precision, train_to_end
from clearhead.train.callbacks import METRICS, LinesFile, Progress, StepMetrics
from clearhead.train.run_dir import holds_run, read_record, refuse_changes, require_no_run
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
    """Train and measure every arm with every seed, and return the records of `config.output`, where
    progress is saved: called again after a stop, it resumes the unfinished run. A run that diverges
    is recorded as such, and the others continue: in a sweep that is a result."""
    config.check()
    require_no_run(config.output)
    with hold_folder(config.output):
        work = Work(say=say) if work is None else work
        done = run_missing(_trials(config), config.output, "compare", work)
    for one in done.runs:
        if one.diverged:
            say(f"{one.arm}, seed {one.seed}: {one.header['diverged']}")
    if all(one.diverged for one in done.runs):
        raise DivergedError(f"no run stayed finite: {done.runs[0].header['diverged']}")
    return done


def _trials(config: CompareConfig) -> list["_Trial"]:
    """Every arm with every seed; one seed of all arms comes before the next."""
    # The fingerprint of the data of a run that has begun in the output folder, or None.
    folders = (folder_of(config, *run) for run in itertools.product(config.arms, config.seeds))
    began = next(filter(None, map(runs.data_of, folders)), None)
    base = None
    if config.base is None:
        corpus = prepare(config.data, progress=say, began=began)
        corpus = with_mask_token(corpus) if config.objective == "mlm" else corpus
    else:
        longest = max(arm.train.sequence_length for arm in config.arms)
        options: Any = {"trust_remote_code": config.trust_remote_code, "began": began}
        base = runs.open_base(config.base, config.data, longest, alike=True, **options)
        corpus = base.corpus
    corpus = corpus.for_tuning() if config.held_out == "training" else corpus
    if unseen := [stream.spec for stream in corpus.split("validation") if not len(stream)]:
        say(f"nothing is held out of {', '.join(unseen)}: validation text has none of it")
    if len(config.seeds) == 1 and len(config.arms) > 1:
        say("one seed cannot tell these models apart: give several, such as --seeds 0 1 2")
    models = [(arm, *_outlined(arm, config, corpus, base)) for arm in config.arms]
    return [_Trial(config, corpus, base, *one, seed) for seed in config.seeds for one in models]


def _outlined(
    arm: Arm, config: CompareConfig, corpus: Corpus, base: Base | None
) -> tuple[Any, Callable[[], Any]]:
    """An arm's model without weights, and the function that builds it, by PyTorch's generator or
    from the base."""
    if base is None:
        keys = runs.fitted(arm.preset, config.size, corpus, arm.train, **arm.model)
        build = partial(runs.new_model, keys)
        with torch.device("meta"):
            outline = build()
        require_positions(outline, arm.train.sequence_length, runs.SHORTER, arm.preset)
        return outline, build
    try:
        outline = base.start(arm.preset, arm.model).model
    except ClearheadError as error:
        raise ClearheadError(f"{arm.name}: {error}") from error
    if remark := runs.resting_sinks(outline, arm.train):
        say(f"{arm.name}: {remark}, in a comparison of arms with a null key or XSA")
    outline.to("meta")
    outline.tie_weights()
    return outline, lambda: base.start(arm.preset, arm.model).model


class _Trial:
    """An arm with a seed."""

    cell = "compared"

    def __init__(
        self, config: CompareConfig, corpus: Corpus, base: Base | None, arm: Arm, *model: Any
    ) -> None:
        self.config, self.corpus = config, corpus
        self.outline, self.build, seed = model
        # As it will be computed: the header of a record has no "auto".
        resolved = precision.resolve(arm.train.precision, best_device())
        self.settings = replace(arm.train, seed=seed, precision=resolved)
        self.folder = folder_of(config, arm, seed)
        self.called = f"{arm.name}, seed {seed}"
        parameters = parameter_count(self.outline)
        tables = [x for x in self.outline.modules() if isinstance(x, nn.Embedding)]
        tables.append(self.outline.get_output_embeddings())
        embeddings = sum(weight.numel() for weight in {one.weight for one in tables})
        self.header = {
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
            "train": asdict(self.settings),
            "data": corpus.describe(),
            "parameters": parameters,
            "non_embedding_parameters": parameters - embeddings,
            "objective": config.objective,
            "lengths": [multiple * arm.train.sequence_length for multiple in config.lengths],
            "evaluation_tokens": config.evaluation_tokens,
            "measure_every": milestone_steps(config.measure_every, self.settings),
            "documents": config.documents,
            "held_out": config.held_out,
        }
        if base is None:
            counts = plan(self.outline.config, length=arm.train.sequence_length)
            self.header["forward_flops"] = counts.forward_flops

    def check(self, known: Mapping[str, Line]) -> None:
        name = self.header["run"]
        recorded = holds_run(self.folder) and name in known
        for run, line in known.items():  # a page pools the seeds of an arm
            arm = all(line.get(key) == self.header[key] for key in ("arm", "label"))
            if recorded if run == name else arm:
                place = self.folder if run == name else self.folder.parent
                refuse_changes(place, _settings(line), _settings(self.header))
        if recorded:
            return
        model = copy.deepcopy(self.outline)
        try:
            choose_parameters(model, self.settings)
            build_optimizer(model, self.settings)
        except ClearheadError as error:
            raise ClearheadError(f"{self.header['arm']}: {error}") from error
        if self.header["lengths"] or self.header["measure_every"]:
            windows(self.corpus, length=self.settings.sequence_length, count=1)

    def rows(self, work: Work) -> Iterator[Line]:
        work.begin(f"{self.called}, {self.header['parameters']:,} parameters")
        every, lengths = self.header["measure_every"], self.header["lengths"]
        apart, masked = self.header["documents"] == "apart", self.header["objective"] == "mlm"
        callbacks = [Progress(work=work), *make_trackers(self.config.track)]
        if every:
            callbacks.append(Milestones(self.corpus, self.settings, every, apart))
        torch.manual_seed(self.settings.seed)
        model, result, diverged = self.build().to(best_device()), None, None
        try:
            model, result = train_to_end(
                model,
                runs.batches(self.corpus, self.settings, self.folder, masked=masked),
                self.settings,
                output=self.folder,
                tokenizer=self.corpus.tokenizer,
                callbacks=callbacks,
                description={"run": self.header["run"], "data": self.header["data"]},
            )
        except DivergedError as error:
            diverged = str(error)
        record = read_record(self.folder)
        self.header |= {key: record[key] for key in KEYS if key in record} | {"diverged": diverged}
        for line in jsonl.steps(self.folder / METRICS):
            yield line | {"kind": "step"}
        if every:
            yield from jsonl.steps(self.folder / MILESTONES)
        for metric in ("seconds", "tokens_per_second", "peak_memory_bytes"):
            value = getattr(result, metric, None)
            reason = {} if value is not None else {"reason": diverged or UNTIMED}
            metric = "train_seconds" if metric == "seconds" else metric
            yield {"metric": metric, "value": value, **reason}
        if diverged is not None:
            none = {"metric": "perplexity", "value": None, "reason": diverged}
            yield from ({**none, "length": length} for length in lengths)
        elif lengths:
            tokens, length = self.config.evaluation_tokens, self.settings.sequence_length
            read: Any = {"tokens": tokens, "documents_apart": apart}
            if masked:
                for size in lengths:
                    yield from masked_loss(model, self.corpus, length=size, **read)
            else:
                yield from perplexity_by_length(model, self.corpus, lengths=lengths, **read)
            count = min(DIAGNOSED_WINDOWS, max(1, tokens // length))
            texts = list(windows(self.corpus, length=length, count=count))
            batch_size = max(1, TOKENS_IN_A_BATCH // length)
            yield from _inside(model, texts, self.settings, batch_size=batch_size)


def _settings(header: Line) -> dict[str, Any]:
    settings = {key: header.get(key) for key in _SETTINGS}
    fingerprint = (header.get("data") or {}).get("fingerprint")
    settings["train"] = {**(header.get("train") or {}), "seed": None}
    return settings | {"data": {"fingerprint": fingerprint}}


def _inside(
    model: Any, texts: Sequence[torch.Tensor], settings: TrainConfig, *, batch_size: int
) -> list[Line]:
    """Attention and hidden states, in the model's own basis and in the one in which OrthoAdam would
    step the embedding's columns with this seed, in one pass."""
    kind, share = settings.rotation or "hadamard", settings.rotation_share or "parameter"
    rotated = RotatedKurtosis(model, kind=kind, share=share, seed=settings.seed)
    parts: Any = {"attention": [ByTile(weights=[RowMeans()])]}
    parts |= {"hidden": [HiddenStatistics(), rotated]}
    return measure_inside(model, texts, batch_size=batch_size, **parts)


class Milestones(LinesFile):
    """Loss (nats a token), outliers of the hidden states and attention to the first token, every
    few steps and after the last, on the same few validation windows: OUTPUT/milestones.jsonl.
    Training is not affected: it finds its random state, modes and compiled layers as they were."""

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
