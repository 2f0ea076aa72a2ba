"""LoRA adapters, by PEFT: added before training, kept by checkpoints, merged at the end."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError, require
from clearhead.models.loading import without_bars

FOLDER = "adapter"  # in the final model's


def present(model: PreTrainedModel) -> bool:
    """True for a model with adapters beside its weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def add(model: PreTrainedModel, modules: list[str], *, rank: int, alpha: float, seed: int) -> None:
    """Give the linear layers of these names an adapter each, which alone is then trained.

    Raises:
        ClearheadError: where PEFT is not installed, or not of a version that transformers takes.
    """
    peft = require("peft", "peft")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
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

    Afterwards all weights can be trained, which PEFT had frozen, and the head is tied to the
    embedding only where it still equals it. A model without adapters stays as it is, and nothing is
    written.

    Raises:
        ClearheadError: for adapters that PEFT cannot merge, such as biases where there were none.
    """
    if not present(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if folder is not None:
        with without_bars():
            model.save_pretrained(folder)
    layers: dict[str, Any] = dict(model.named_modules())
    merged = list[str]()
    try:
        for name, layer in layers.items():
            if any(name.startswith(f"{parent}.") for parent in merged):
                continue  # a part of what was replaced
            if isinstance(layer, BaseTunerLayer):
                layer.merge()
                model.set_submodule(name, layer.get_base_layer())
            elif isinstance(layer, AuxiliaryTrainingWrapper):  # saved whole, or some tokens' rows
                whole = layer.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=None
                )
                model.set_submodule(name, whole)
                merged.append(name)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # of kinds that PEFT refuses
        reason = " ".join(str(error).split()).rstrip(".")
        raise ClearheadError(
            f"this adapter cannot be merged into its model ({reason}): give the model without it"
        ) from error
    model._hf_peft_config_loaded = False
    del model.peft_config
    # transformers saves by the names that it loaded last: the adapter's, which no model has.
    model._weight_conversions = None
    model.requires_grad_(True)
    _settle_head(model)


def _settle_head(model: PreTrainedModel) -> None:
    """Untie the head in the configuration where adapters moved it or the embedding alone.

    PEFT splits the two. Where both were moved alike, they are one again.
    """
    head = model.get_output_embeddings()
    if head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    if torch.equal(head.weight, model.get_input_embeddings().weight):
        model.tie_weights()
    else:
        model.config.tie_word_embeddings = False
