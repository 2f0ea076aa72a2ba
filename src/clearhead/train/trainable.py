"""Choice of the parameters that are trained: by name, or through low-rank adapters (LoRA, by PEFT).

Adapters are added before training, kept by checkpoints, and merged at the end.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError, require
from clearhead.models.loading import without_bars
from clearhead.optim.groups import Named, matched, split_named
from clearhead.train.config import TrainConfig

ADAPTERS = "adapter"  # in the final model's


def choose_parameters(model: PreTrainedModel, config: TrainConfig) -> None:
    """Freeze what `only` leaves out and what `freeze` names; with `lora` add the adapters.

    Frozen parameters stay frozen. A ClearheadError for patterns without an effect, and for those
    that leave nothing to train.
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
    if config.lora and not has_adapters(model):
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
        _add_adapters(model, modules, rank=config.lora, seed=config.seed)


def _freeze(named: Iterable[Named]) -> None:
    for _, parameter in named:
        parameter.requires_grad_(False)


def _words(patterns: Iterable[str]) -> str:
    return " ".join(patterns) or "not given"


def has_adapters(model: PreTrainedModel) -> bool:
    """True for a model with adapters beside its weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _add_adapters(model: PreTrainedModel, modules: list[str], *, rank: int, seed: int) -> None:
    """Give the linear layers of these names an adapter each, which alone is then trained."""
    peft = require("peft", "peft")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules,
        # Of transformers' own linear layers, which are stored transposed.
        fan_in_fan_out=not all(
            isinstance(model.get_submodule(name), nn.Linear) for name in modules
        ),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model.add_adapter(settings)
        except ValueError as error:  # transformers 5.24 wants a PEFT newer than the newest
            raise ClearheadError(
                f"transformers {transformers.__version__} takes no adapter of PEFT "
                f"{peft.__version__} ({error}): install another version of either"
            ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def merge_adapters(model: PreTrainedModel, folder: Path | None = None) -> None:
    """Write a model's adapters to `folder`, then merge them into the weights and remove them.

    Afterwards all weights are trainable, which PEFT had frozen. Without adapters nothing is changed
    or written.
    """
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    if folder is not None:
        with without_bars():
            model.save_pretrained(folder)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    model._hf_peft_config_loaded = False
    del model.peft_config
    # transformers saves by the names that it loaded last: the adapter's, which no model has.
    model._weight_conversions = None
    model.requires_grad_(True)
