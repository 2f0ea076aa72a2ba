"""A trained model from which runs start: unchanged, or with other mechanisms."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from clearhead.data import Corpus, DataConfig
from clearhead.errors import ClearheadError
from clearhead.lab.configs import Arm, CompareConfig
from clearhead.lab.run_setup import (
    check_length,
    fitted,
    new_model,
    own_text,
    refuse_tokenizer,
    require_own_tokenizer,
)
from clearhead.measure.sweep import parameters_digest
from clearhead.models.conversion import imported, require_convertible
from clearhead.models.families import FAMILIES
from clearhead.models.families.family import dropouts, filled, words_of
from clearhead.models.inspection import parameter_count
from clearhead.models.loading import load
from clearhead.models.starts import Start, started, target
from clearhead.nn.normalizers import AT_REST, Sink
from clearhead.optim.build import matched
from clearhead.terminal import say
from clearhead.train import TrainConfig


@dataclass(frozen=True)
class Base:
    """A causal model of any library, its tokenizer, and text tokenised by it for windows of one
    length."""

    name: str
    model: Any
    corpus: Corpus
    length: int

    def start(self, preset: str | None, settings: Mapping[str, Any]) -> Start:
        """A copy with the mechanisms of a preset and of further settings; in the model's own class
        where they change nothing.

        Raises:
            ClearheadError: for an unknown preset or setting, windows for which learned keys leave
                too few positions, and as `imported` and `started`.
        """
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
    `alike` leaves out the dropout of its own class, which is lost with other mechanisms.

    Raises:
        ClearheadError: for a model that cannot be opened or is quantised, a tokenizer given beside
            its own or with more entries than it has, and windows longer than it can read; as
            `prepare`.
    """
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


class Outlined(NamedTuple):
    """An arm, its model without weights on the meta device, and the function that builds it, from
    PyTorch's generator or from the base."""

    arm: Arm
    outline: Any
    build: Callable[[], Any]


def outlined(arm: Arm, config: CompareConfig, corpus: Corpus, base: Base | None) -> Outlined:
    """Outline the model of an arm.

    Raises:
        ClearheadError: where it cannot be built, or made from the base.
    """
    if base is None:
        build = partial(new_model, fitted(arm.preset, config.size, corpus, arm.train, **arm.model))
        with torch.device("meta"):
            outline = build()
        check_length(outline, arm.preset, arm.train.sequence_length)
        return Outlined(arm, outline, build)
    try:
        outline = base.start(arm.preset, arm.model).model
    except ClearheadError as error:
        raise ClearheadError(f"{arm.name}: {error}") from error
    if remark := resting_sinks(outline, arm.train):
        say(f"{arm.name}: {remark}, in a comparison of arms with a null key or XSA")
    outline.to("meta")
    outline.tie_weights()
    return Outlined(arm, outline, lambda: base.start(arm.preset, arm.model).model)


def counted(model: Any) -> dict[str, int]:
    """Parameters of any model, and those that are neither embeddings nor the head."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {module.weight for module in (*modules, model.get_output_embeddings())}
    total = parameter_count(model)
    other = total - sum(table.numel() for table in tables)
    return {"parameters": total, "non_embedding_parameters": other}
