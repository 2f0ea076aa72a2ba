"""Choice of the parameters that are trained: by name, or low-rank adapters (LoRA, by PEFT)."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError, require
from clearhead.models.loading import without_bars
from clearhead.optim.build import matched, split_named
from clearhead.settings.train import TrainConfig

ADAPTERS = "adapter"  # in the final model's


def choose_parameters(model: PreTrainedModel, config: TrainConfig) -> None:
    """Freeze what `only` leaves out and what `freeze` names; with `lora` add the adapters. Patterns
    without an effect, or that leave nothing to train, are refused."""
    others = split_named(model, config.only)[1] if config.only else []
    for _, parameter in others:
        parameter.requires_grad_(False)
    for _, parameter in split_named(model, config.freeze)[0]:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ClearheadError("nothing is left to train: leave out a pattern of only or freeze")
    if not config.lora or has_adapters(model):
        return
    head = model.get_output_embeddings()  # which may be the embedding itself
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and module.weight.requires_grad
    }
    idle = [p for p in config.only if not any(matched(f"{name}.weight", (p,)) for name in layers)]
    if idle or not layers:
        raise ClearheadError(
            f"lora trains linear layers, and {' '.join(idle) or 'only and freeze'} leaves none: "
            "leave out a pattern, or train without lora"
        )
    settings = require("peft", "peft").LoraConfig(
        r=config.lora,
        lora_alpha=2 * config.lora,
        target_modules=list(layers),
        # Of transformers' own linear layers, which are stored transposed.
        fan_in_fan_out=not all(isinstance(layer, nn.Linear) for layer in layers.values()),
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(settings)
        except ValueError as error:  # transformers 5.24 wants a PEFT newer than the newest
            raise ClearheadError(f"this transformers takes no adapter of PEFT: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def has_adapters(model: PreTrainedModel) -> bool:
    """True for a model with adapters beside its weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def merge_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's adapters, where it has any, to `folder`; merge them into the weights, all of
    which are trainable afterwards."""
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

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
