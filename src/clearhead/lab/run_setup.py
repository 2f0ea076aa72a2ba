"""Models, texts and batches of runs, from presets or from trained models; and the runs themselves.

OUTPUT/RUN/             a run's folder (`clearhead.train.run_dir`); its model is in RUN/final
OUTPUT/records.jsonl    the records, to which each run is appended as soon as it is measured
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from clearhead.data import Batches, Corpus, DataConfig, MaskedBatches, Masking, prepare
from clearhead.data.config import SHARE
from clearhead.data.tokenizer import vocabulary_size, yielded
from clearhead.errors import ClearheadError
from clearhead.lab.configs import RECORDS
from clearhead.lab.sweep_configs import OWN
from clearhead.measure.sweep import parameters_digest
from clearhead.models import ClearheadConfig, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.conversion import imported, require_convertible
from clearhead.models.families import FAMILIES
from clearhead.models.families.family import dropouts, filled, words_of
from clearhead.models.inspection import longest_text
from clearhead.models.loading import best_device, load
from clearhead.models.starts import Start, started, target
from clearhead.nn.null_keys import AT_REST, Sink
from clearhead.optim.groups import matched
from clearhead.progress import Work
from clearhead.records.loading import Store
from clearhead.records.runs import Line, Records
from clearhead.terminal import say
from clearhead.train import TrainConfig
from clearhead.train.run_dir import RUN_FILE, holds_run, is_finished, read_record


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
    user's own `changes` win, but a vocab_size that leaves out ids."""
    base = preset(name, size, **changes)
    ids = corpus.vocabulary_size
    if "vocab_size" in changes and base.vocab_size < ids:
        raise ClearheadError(f"vocab_size is {base.vocab_size}, and the tokenizer has {ids} ids")
    room = max(base.max_position_embeddings, settings.sequence_length)
    keys = {"vocab_size": ids, "max_position_embeddings": room}
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys[token] = getattr(corpus.tokenizer, token)
    return preset(name, size, **{**keys, **changes})


def check_length(model: Any, name: str, length: int, option: str = "sequence-length") -> None:
    """Refuse texts longer than the model can tell positions apart; `option` sets their length."""
    limit, ours = longest_text(model), isinstance(model.config, ClearheadConfig)
    if limit is None and ours:
        limit = model.base_model.position.longest()
        limit = limit and limit - model.base_model.prefix_length
    if limit is not None and length > limit:
        raise ClearheadError(
            f"windows of {length} tokens are more than the {limit} positions of {name}: give "
            f"--train.{option} {limit}" + ", or raise max_position_embeddings" * ours
        )


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
    return read_record(output).get("data") if (output / RUN_FILE).exists() else None


def own_text(data: DataConfig, tokenizer: Any, began: str | None = None) -> Corpus:
    """The text tokenised by a model's own tokenizer; without an end token documents have no END."""
    return prepare(data, tokenizer=tokenizer, progress=say, closed=False, began=began)


def run_of(model: str) -> dict[str, Any]:
    """The run.json of the training run with this folder or final model; {} for other models."""
    folder = Path(model)
    places = (one for one in (folder, folder.parent) if (one / RUN_FILE).is_file())
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


def refuse_tokenizer(data: DataConfig) -> None:
    """Raise a ClearheadError if `data` names a tokenizer, since the model has its own."""
    for name in ("tokenizer", "vocabulary"):
        if getattr(data, name) != getattr(DataConfig, name):
            raise ClearheadError(f"data.{name} has no effect: the model's tokenizer reads the text")


def load_model(
    name: str, kinds: tuple[str, ...] = ("causal",), *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """A model of one of the `kinds` in eval mode on the best device, and its tokenizer."""
    model, tokenizer = load(name, kinds, trust_remote_code=trust_remote_code)
    return model.to(best_device()), tokenizer


def require_own_tokenizer(name: str, model: Any, tokenizer: Any) -> None:
    """Raise a ClearheadError if a text could contain tokens for which the model has no embedding;
    tokens that no text contains, such as a padding token, may lie beyond the embeddings."""
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
        check_length(start.model, f"{self.name} beside learned keys", self.length)
        return start

    @cached_property
    def origin(self) -> dict[str, str]:
        """The model's name and a hash of its weights, for records."""
        return {"name": self.name, "parameters": parameters_digest(self.model)}


def open_base(
    name: str,
    data: DataConfig,
    length: int,
    *,
    trust_remote_code: bool,
    began: str | None = None,
    alike: bool = False,
) -> Base:
    """Open a model, in float32, for training in windows of `length`, and prepare its text.
    `alike` leaves out the dropout of its own class, which is lost with other mechanisms."""
    refuse_tokenizer(data)
    require_convertible(name, trust_remote_code=trust_remote_code)
    model, tokenizer = load(name, trust_remote_code=trust_remote_code)
    check_length(model, name, length)
    require_own_tokenizer(name, model, tokenizer)
    corpus = own_text(data, tokenizer, began)
    shares = dropouts(model.config) if alike and type(model).__name__ in FAMILIES else {}
    if shares:
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


class Trial:
    """A configuration with a seed."""

    called: str
    folder: Path
    header: Line  # the run's line in the records, to which `rows` may add
    cell: str  # identifies the result among those of the run

    def check(self, known: Mapping[str, Line]) -> None:
        """Refuse what would fail only hours later, and settings that differ from those of the runs
        in `known`, the lines of the records by name of run."""

    def rows(self, work: Work) -> Iterable[Line]:
        """Train the model, or go on where it stopped, and measure it."""
        raise NotImplementedError


def run_missing(trials: Sequence[Trial], output: Path, task: str, work: Work) -> Records:
    """Train and measure the trials that `output` lacks, a locked folder; return its records."""
    store = Store(output / RECORDS)
    for one in trials:  # all before the first is trained, which may take hours
        one.check(store.headers)
    work.start(len(trials))
    for one in trials:
        diverged = store.headers.get(one.header["run"], {}).get("diverged")
        there = holds_run(one.folder) if diverged else is_finished(one.folder)
        if there and store.has(one.cell, one.header):
            work.skip()
            say(f"{one.called}: already done")
            continue
        rows = [*one.rows(work)]
        store.add(one.cell, one.header, rows, task=task)
        work.end()
    return store.records()
