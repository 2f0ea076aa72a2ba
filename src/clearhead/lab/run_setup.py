"""Models and batches of runs, from the names of presets and checkpoints and from a corpus."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.data import Batches, Corpus, DataConfig, MaskedBatches, Masking, prepare
from clearhead.data.config import SHARE
from clearhead.data.tokenizer import vocabulary_size, yielded
from clearhead.errors import ClearheadError
from clearhead.lab.sweep_configs import OWN
from clearhead.models import ClearheadConfig, ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models.inspection import longest_text
from clearhead.models.loading import best_device, load
from clearhead.terminal import say
from clearhead.train import TrainConfig
from clearhead.train.run_dir import RUN_FILE, read_record

# Objective → the model class that learns it.
OBJECTIVES = {cls.objective: cls for cls in (ClearheadForCausalLM, ClearheadForMaskedLM)}


def fitted(
    name: str, size: str, corpus: Corpus, settings: TrainConfig, **changes: Any
) -> ClearheadConfig:
    """The preset with the corpus's vocabulary and special tokens, and room for its windows; the
    user's own `changes` win. Raises as `preset`, and for a vocab_size that leaves out ids."""
    base = preset(name, size, **changes)
    if base.vocab_size < corpus.vocabulary_size and "vocab_size" in changes:
        raise ClearheadError(
            f"vocab_size is {base.vocab_size}, and the tokenizer has {corpus.vocabulary_size} ids: "
            "leave it out, or give another --data.vocabulary or --data.tokenizer"
        )
    room = max(base.max_position_embeddings, settings.sequence_length)
    keys = {"vocab_size": corpus.vocabulary_size, "max_position_embeddings": room}
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
        more = ", or raise max_position_embeddings" * ours
        raise ClearheadError(
            f"windows of {length} tokens are more than the {limit} positions of {name}: "
            f"give --train.{option} {limit}{more}"
        )


def batches(
    corpus: Corpus, settings: TrainConfig, output: Path, *, masked: bool = False
) -> Batches | MaskedBatches:
    """The training batches that the settings ask for, in the order of a run in `output`.

    Args:
        masked: hide a share of the tokens; `corpus` then has a mask token
            (`clearhead.data.with_mask_token`).
    """
    begin = corpus.tokenizer.bos_token_id if settings.begin_windows else None
    if settings.begin_windows and begin is None:
        raise ClearheadError(
            "begin_windows needs a begin token, which this tokenizer lacks: leave it out, or "
            "choose another --data.tokenizer"
        )
    names = ("sequence_length", "batch_size", "seed", "accumulation", "document_masks")
    options: Any = {name: getattr(settings, name) for name in names}
    plain = Batches(corpus, begin=begin, began=data_of(output), **options)
    return MaskedBatches(plain, Masking(corpus.tokenizer, SHARE)) if masked else plain


def data_of(output: Path) -> str | None:
    """The fingerprint of the batches of the run in a folder; None where there is no run."""
    return read_record(output).get("data") if (output / RUN_FILE).exists() else None


def objective_of(config: ClearheadConfig) -> str:
    """The objective of a model: hidden tokens if it is bidirectional, else the next token."""
    return "mlm" if config.direction == "bidirectional" else "next-token"


def own_text(data: DataConfig, tokenizer: Any, began: str | None = None) -> Corpus:
    """The text tokenised by a model's own tokenizer; without an end token documents have no END."""
    return prepare(data, tokenizer=tokenizer, progress=say, closed=False, began=began)


def run_of(model: str) -> dict[str, Any]:
    """The run.json of the training run with this folder or final model; {} for other models."""
    folder = Path(model)
    places = (one for one in (folder, folder.parent) if (one / RUN_FILE).is_file())
    return next(map(read_record, places), {})


def text_of(data: DataConfig, models: Sequence[str]) -> DataConfig:
    """The text that `data` names; if it names none, that of the runs that trained the models.

    Raises:
        ClearheadError: runs of different texts.
    """
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
        raise ClearheadError(
            f"these models were trained on different texts ({named}): give --data.data, the text "
            "on which all are measured"
        )
    return next(iter(texts), replace(data, data=DataConfig.data))


def new_model(config: ClearheadConfig) -> Any:
    """A model with fresh weights, of the class that learns its objective."""
    return OBJECTIVES[objective_of(config)](config)


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
    """Raise a ClearheadError if a text could contain tokens for which the model has no embedding.

    Tokens that no text contains, such as a padding token, may lie beyond the embeddings.
    """
    entries = model.get_input_embeddings().num_embeddings
    if vocabulary_size(tokenizer) <= entries:
        return
    ids = {*yielded(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    if max(ids) >= entries:
        raise ClearheadError(
            f"the tokenizer of {name} reads texts into ids up to {max(ids)}, beyond the {entries} "
            "embeddings of its model: restore the one it was trained with, or give the model rows "
            "by resize_token_embeddings"
        )
