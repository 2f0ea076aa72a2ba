"""Runs: their models, texts and batches, from presets or from trained models; and their order.

OUTPUT/RUN/             a run's folder (`clearhead.train.run_dir`); its model is in RUN/final
OUTPUT/records.jsonl    the records, to which each run is appended as soon as it is measured
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clearhead.data import Batches, Corpus, DataConfig, prepare
from clearhead.data.batches import MaskedBatches, Masking, with_mask_token
from clearhead.data.tokenizer import vocabulary_size, yielded
from clearhead.errors import ClearheadError
from clearhead.lab.configs import CompareConfig, TrainJob
from clearhead.lab.sweep_configs import OWN
from clearhead.measure.sweep import parameters_digest
from clearhead.models import BASELINE, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.conversion import imported, require_convertible
from clearhead.models.families import FAMILIES
from clearhead.models.families.family import dropouts, filled, words_of
from clearhead.models.inspection import parameter_count, require_positions
from clearhead.models.loading import best_device, load
from clearhead.models.starts import Start, check_baseline, started, target
from clearhead.nn.null_keys import AT_REST, Sink
from clearhead.optim import learning_rate
from clearhead.optim.build import matched
from clearhead.progress import Work
from clearhead.records.files import hold_folder
from clearhead.records.identity import canonical, differences, restored
from clearhead.records.loading import Store
from clearhead.records.runs import Line, Records
from clearhead.settings.data import SHARE
from clearhead.terminal import say
from clearhead.train import TrainConfig, TrainResult, checkpoint, run_dir, train
from clearhead.train.callbacks import Progress, make_trackers
from clearhead.train.run_dir import holds_run, is_finished, read_record
from clearhead.train.world import joined

SHORTER = "give a smaller --train.sequence-length"
_OF_THE_RUN = ("output", "train", "resume")  # of a job: not among the settings that a run keeps


def objective_of(config: ClearheadConfig) -> str:
    """The objective of a model: hidden tokens if it is bidirectional, else the next token."""
    return "mlm" if config.direction == "bidirectional" else "next-token"


def new_model(config: ClearheadConfig) -> Any:
    """A model with fresh weights, of the class that learns its objective."""
    masked = objective_of(config) == "mlm"
    return (ClearheadForMaskedLM if masked else ClearheadForCausalLM)(config)


def fitted(
    name: str, size: str, corpus: Corpus, settings: TrainConfig, **changes: Any
) -> ClearheadConfig:
    """The preset with the corpus's vocabulary and special tokens, and room for its windows; the
    user's `changes` win, except a vocab_size too small for the ids."""
    base = preset(name, size, **changes)
    ids = corpus.vocabulary_size
    if "vocab_size" in changes and base.vocab_size < ids:
        raise ClearheadError(f"vocab_size is {base.vocab_size}, and the tokenizer has {ids} ids")
    room = max(base.max_position_embeddings, settings.sequence_length)
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    keys = {"vocab_size": ids, "max_position_embeddings": room}
    keys |= {token: getattr(corpus.tokenizer, token) for token in tokens}
    return preset(name, size, **{**keys, **changes})


def batches(
    corpus: Corpus, settings: TrainConfig, output: Path, *, masked: bool = False
) -> Batches | MaskedBatches:
    """The training batches, in the order of a run in `output`; `masked` hides a share of the tokens
    of a corpus with a mask token."""
    begin = corpus.tokenizer.bos_token_id if settings.begin_windows else None
    if settings.begin_windows and begin is None:
        raise ClearheadError("begin_windows needs a begin token, which this tokenizer lacks")
    names = ("sequence_length", "batch_size", "seed", "accumulation", "document_masks")
    options: Any = {name: getattr(settings, name) for name in names}
    plain = Batches(corpus, begin=begin, began=data_of(output), **options)
    return MaskedBatches(plain, Masking(corpus.tokenizer, SHARE)) if masked else plain


def data_of(output: Path) -> str | None:
    """The fingerprint of the batches of the run in a folder; None where there is no run."""
    return read_record(output).get("data") if (output / run_dir.RUN_FILE).exists() else None


def run_of(model: str) -> dict[str, Any]:
    """The run.json of the training run with this folder or final model; {} for other models."""
    folder = Path(model)
    places = (one for one in (folder, folder.parent) if (one / run_dir.RUN_FILE).is_file())
    return next(map(read_record, places), {})


def text_of(data: DataConfig, models: Sequence[str]) -> DataConfig:
    """The text that `data` names; if it names none, that of the runs that trained the models, which
    must be the same."""
    if data.data != OWN:
        return data
    texts: dict[DataConfig, str] = {}
    for model in models:
        described = run_of(model).get("description", {}).get("data") or {}
        if "sources" in described:
            words = [
                one["spec"] + (f"@{one['weight']!r}" if one["weight"] is not None else "")
                for one in described["sources"]
            ]
            known = {name: described[name] for name in ("validation", "limit", "text_field")}
            texts.setdefault(replace(data, data=tuple(words), **known), model)
    if len(texts) > 1:
        named = "; ".join(f"{model}: {', '.join(text.data)}" for text, model in texts.items())
        raise ClearheadError(f"models trained on different texts ({named}): give --data.data")
    return next(iter(texts), replace(data, data=DataConfig.data))


def load_model(
    name: str, kinds: tuple[str, ...] = ("causal",), trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the best device, and its tokenizer."""
    model, tokenizer = load(name, kinds, trust_remote_code=trust_remote_code)
    return model.to(best_device()), tokenizer


def require_own_tokenizer(name: str, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer whose texts have tokens without an embedding; others, such as a padding
    token, may lie beyond the embeddings."""
    entries = model.get_input_embeddings().num_embeddings
    if vocabulary_size(tokenizer) <= entries:
        return
    ids = {*yielded(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    if max(ids) >= entries:
        beyond = f"ids up to {max(ids)}, beyond the {entries} embeddings of its model"
        raise ClearheadError(f"the tokenizer of {name} reads texts into {beyond}: restore its own")


@dataclass(frozen=True)
class Base:
    """A trained causal model of any library to start from, and text of its own tokenizer for
    windows of one length."""

    name: str
    model: Any
    corpus: Corpus
    length: int

    def start(self, preset: str | None, settings: Mapping[str, Any]) -> Start:
        """A copy with the mechanisms of a preset and of further settings; in the model's own class
        where they change nothing."""
        changes = target(preset, settings)
        if not changes:
            return Start(copy.deepcopy(self.model), (), ())
        start = started(imported(self.model), changes)
        named = f"{self.name} beside learned keys"
        require_positions(start.model, self.length, SHORTER, named)
        return start

    @cached_property
    def origin(self) -> dict[str, str]:
        """The model's name and a hash of its weights, for records."""
        return {"name": self.name, "parameters": parameters_digest(self.model)}


def open_base(job: TrainJob | CompareConfig, length: int, began: str | None) -> Base:
    """The model, in float32, that a job starts from, for windows of `length`, and its text. Arms
    are without the dropout of the model's own class, which is lost with other mechanisms."""
    name, trust = str(job.base), job.trust_remote_code
    require_convertible(name, trust_remote_code=trust)
    model, tokenizer = load(name, trust_remote_code=trust)
    require_positions(model, length, SHORTER, name)
    require_own_tokenizer(name, model, tokenizer)
    corpus = prepare(job.data, tokenizer=tokenizer, progress=say, closed=False, began=began)
    alike = isinstance(job, CompareConfig) and type(model).__name__ in FAMILIES
    if shares := dropouts(model.config) if alike else {}:
        say(f"{words_of(shares)}: left out of every arm, since a converted model has no dropout")
        config = copy.deepcopy(model.config)
        for key in shares:
            setattr(config, key, 0.0)
        model = filled(type(model), config, model.state_dict(), model)
    return Base(name, model.float(), corpus, length)


def resting_sinks(model: Any, config: TrainConfig) -> str:
    """A warning with its remedy for sinks to be trained that no gradient reaches; "" for none."""
    rests = [
        module.rests
        for name, module in model.named_modules()
        if isinstance(module, Sink)
        and (not config.only or matched(f"{name}.logit", config.only))
        and not matched(f"{name}.logit", config.freeze)
    ]
    return f"{AT_REST}: give --set annealed_start=true" if rests and all(rests) else ""


def run_training(job: TrainJob) -> TrainResult:
    """Train the model of a job, or go on with the run in its output folder where `job.resume` names
    it; OUTPUT/final is then a plain Hugging Face checkpoint."""
    with joined(job.train.timeout, alone=job.train.parallel != "fsdp") as world:
        resume = job.resume is not None
        resumes = resume or world.restarted()  # a collective call

        def check_folder() -> None:
            """Refuse a folder in use, and for a new run one with runs, before any text is read."""
            with hold_folder(job.output):
                if not resumes:
                    run_dir.require_no_run(job.output)
                    if any(job.output.glob("*seed*/run.json")):
                        raise ClearheadError(f"{job.output} holds the runs of another verb")

        world.by_first(check_folder)
        began = data_of(job.output) if resume else None
        start: dict[str, Any] = {"preset": job.preset, "from": None}
        if job.base is None:
            start |= {"preset": job.preset or BASELINE, "size": job.size}
            model, corpus = world.in_turn(lambda: _new(job, start["preset"], began))
        else:
            base = world.in_turn(lambda: open_base(job, job.train.sequence_length, began))
            corpus, start["from"] = base.corpus, base.origin
            if isinstance(base.model, ClearheadForCausalLM):
                check_baseline(job.preset, job.set, base.model.config)
            begun = base.start(job.preset, job.set)
            model = begun.model
            for line in begun.in_words():
                say(line)
            if resume:  # it may read the weights that it began with
                first = read_record(job.output)["description"].get("from") or {}
                reads = job.train.lora or checkpoint.newest(job.output) is None
                reads = reads or job.base != first.get("name")
                if reads and first.get("parameters") != base.origin["parameters"]:
                    began_with = f"the run in {job.output} started from ({first.get('name')})"
                    raise ClearheadError(f"{job.base} has other weights than {began_with}")
            elif remark := resting_sinks(model, job.train):
                say(remark)
        say(f"{job.preset or job.base or BASELINE}: {parameter_count(model):,} parameters")
        planned = job.train.schedule_tokens or job.train.tokens
        if planned < job.train.tokens:
            rate = learning_rate(job.train.steps - 1, job.train)
            say(f"after the {planned:,} tokens of the schedule the learning rate stays at {rate:g}")
        torch.manual_seed(job.train.seed)
        masked = getattr(model, "objective", "") == "mlm"
        with world.together():
            read = batches(corpus, job.train, job.output, masked=masked)
        return train(
            model.to(best_device()),
            read,
            job.train,
            output=job.output,
            tokenizer=corpus.tokenizer,
            resume=resume,
            callbacks=[Progress(), *make_trackers(job.track)],
            description={
                **start,
                "objective": "mlm" if masked else "next-token",
                "mask": SHARE if masked else None,
                "data": corpus.describe(),
                "job": {k: x for k, x in canonical(job).items() if k not in _OF_THE_RUN},
            },
        )


def _new(job: TrainJob, name: str, began: str | None) -> tuple[Any, Any]:
    """A preset with fresh weights, and its text; `began`: fingerprint of a begun run's text."""
    config = preset(name, job.size, **job.set)  # refuses before anything is read
    corpus = prepare(job.data, progress=say, began=began)
    if objective_of(config) == "mlm":
        corpus = with_mask_token(corpus)
    config = fitted(name, job.size, corpus, job.train, **job.set)
    torch.manual_seed(job.train.seed)
    model = new_model(config)
    require_positions(model, job.train.sequence_length, SHORTER, name)
    return model, corpus


def recorded(output: Path) -> TrainJob:
    """The job whose run is in `output`, with the settings that it has now."""
    record = read_record(output)
    try:
        names = {one.name for one in fields(TrainJob)}
        settings = {key: x for key, x in record["description"]["job"].items() if key in names}
        return replace(restored(TrainJob, settings | {"train": record["config"]}), output=output)
    except (AttributeError, KeyError, TypeError):
        own = f"give its own command again, {str(record.get('command'))!r}"
        raise ClearheadError(f"{output} is not of this version's clearhead train: {own}") from None


def extended(job: TrainJob, begun: TrainJob) -> TrainJob:
    """The begun run with the changes that `job` may make; any other is refused by its option."""
    free = {f"--train.{key.replace('_', '-')}" for key in run_dir.FREE_KEYS | {"tokens"}}
    free |= {"--track", "--resume", "--data.cache", "--trust-remote-code"}
    # Files may have moved: content is compared, by its fingerprint.
    free |= {"--data.data", "--data.tokenizer"} | ({"--from"} if begun.base else set())
    own = {"preset": "preset", "base": "--from", "set": "--set"}  # not named as their fields
    names = [name for name, _, _ in differences(canonical(begun), canonical(job))]
    changed = {own.get(one.split(".")[0], f"--{one.replace('_', '-')}") for one in names}
    if fixed := sorted(changed - free):
        raise ClearheadError(f"leave out {', '.join(fixed)}, or start another run")
    if job.train.tokens == begun.train.tokens:
        return job
    planned = begun.train.schedule_tokens or begun.train.tokens
    return replace(job, train=replace(job.train, schedule_tokens=planned))


class Trial(NamedTuple):
    """One run of several, whose settings are checked: `rows` trains it, or goes on where it
    stopped, measures it, and completes its `header`."""

    called: str
    folder: Path
    cell: str
    header: Line
    rows: Callable[[Work], Iterable[Line]]


def run_missing(trials: Sequence[Trial], store: Store, task: str, work: Work | None) -> Records:
    """Train and measure the trials that the store of a locked folder lacks; return its records."""
    work = Work(say=say) if work is None else work
    work.start(len(trials))
    for one in trials:
        diverged = store.headers.get(one.header["run"], {}).get("diverged")
        there = holds_run(one.folder) if diverged else is_finished(one.folder)
        if there and store.has(one.cell, one.header):
            work.skip()
            say(f"{one.called}: already done")
            continue
        work.begin(one.called)
        rows = [*one.rows(work)]
        store.add(one.cell, one.header, rows, task=task)
        work.end()
    return store.records()
