"""LoRA adapters, by PEFT: added before training, kept by checkpoints, merged at the end."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError, require
from clearhead.models.loading import without_bars

FOLDER = "adapter"  # in the final model's


def present(model: PreTrainedModel) -> bool:
    """True for a model with adapters beside its weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def add(model: PreTrainedModel, modules: list[str], *, rank: int, seed: int) -> None:
    """Give the linear layers of these names an adapter each, which alone is then trained.

    Raises:
        ClearheadError: where PEFT is not installed, or not of a version that transformers takes.
    """
    peft = require("peft", "peft")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules,
        # Of transformers' own linear layers, which are stored transposed.
        fan_in_fan_out=not all(
            isinstance(model.get_submodule(name), torch.nn.Linear) for name in modules
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


def merge(model: PreTrainedModel, folder: Path | None = None) -> None:
    """Add the adapters to the weights, in place of them; before, write them to `folder`.

    Afterwards all weights can be trained, which PEFT had frozen. A model without adapters stays as
    it is, and nothing is written.
    """
    if not present(model):
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
