"""Choice of the parameters that are trained: by name, or through low-rank adapters."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError
from clearhead.optim.groups import Named, matched, split_named
from clearhead.train import adapters
from clearhead.train.config import TrainConfig


def choose_parameters(model: PreTrainedModel, config: TrainConfig) -> None:
    """Freeze what `only` leaves out and what `freeze` names; with `lora` add the adapters.

    What is frozen already stays so.

    Raises:
        ClearheadError: for a pattern that matches nothing left to train, for patterns that leave
            nothing, for adapters where no linear layer is left, a pattern names none or PEFT is not
            installed.
    """
    if config.only:
        _freeze(split_named(model, config.only)[1])
    if config.freeze:
        _freeze(split_named(model, config.freeze)[0])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ClearheadError(
            f"nothing is left to train: only is {_words(config.only)}, freeze is "
            f"{_words(config.freeze)}; leave out a pattern"
        )
    if config.lora and not adapters.present(model):
        head = model.get_output_embeddings()  # which may be the embedding itself
        modules = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
            and module is not head
            and module.weight.requires_grad
        ]
        if not modules:
            raise ClearheadError(
                "lora trains linear layers, and only and freeze leave none: leave out a pattern"
            )
        for pattern in config.only:
            if not any(matched(f"{name}.weight", (pattern,)) for name in modules):
                raise ClearheadError(
                    f"lora trains linear layers, and the pattern {pattern!r} of only names none of "
                    "them: leave it out, or train without lora"
                )
        adapters.add(model, modules, rank=config.lora, seed=config.seed)


def _freeze(named: Iterable[Named]) -> None:
    for _, parameter in named:
        parameter.requires_grad_(False)


def _words(patterns: Iterable[str]) -> str:
    return " ".join(patterns) or "not given"
