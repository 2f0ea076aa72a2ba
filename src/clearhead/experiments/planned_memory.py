"""Memory counted on tensors without storage: a training step by part, and bytes by length."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from clearhead import ops
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError, choose
from clearhead.experiments.run_setup import OBJECTIVES, objective_of
from clearhead.experiments.sweep_configs import PlanConfig
from clearhead.models import (
    PRESETS,
    ClearheadConfig,
    ClearheadForCausalLM,
    ClearheadForMaskedLM,
    plan,
    preset,
)
from clearhead.models.planning import without_data
from clearhead.models.pretrained import cache_of
from clearhead.optim import build_optimizer
from clearhead.records.files import write_text
from clearhead.records.loading import as_line
from clearhead.records.provenance import provenance
from clearhead.records.runs import Line
from clearhead.train.config import TrainConfig

# A part of the bill, and the kinds of memory that PyTorch's tracker tells apart.
_PARTS = {
    "weights": ("PARAM", "BUFFER"),
    "gradients": ("GRAD",),
    "optimizer": ("OPT",),
    "activations": ("ACT", "TEMP", "OTH", "INP"),
}
_SHARED = ("weights", "gradients", "optimizer")  # among GPUs


def training_memory(
    config: Any, train: TrainConfig, *, checkpointing: bool = False, gpus: int = 1
) -> Mapping[str, int]:
    """Bytes of tensors on one GPU when a training step holds most, by part.

    The step is eager, on the CPU's kernels; `precision` "auto" counts as bf16. Each of several GPUs
    holds its share of weights, gradients and optimizer; a layer that is gathered whole while it
    runs is not counted.

    Args:
        config: of any model of clearhead's, or causal language model of transformers'.
        checkpointing: whether layers compute their activations again in the backward pass.

    Raises:
        ClearheadError: a model or an optimizer that reads numbers of its tensors, such as a mixture
            of experts, or Adafactor.
    """
    with torch.device("meta"):
        model = _model(config).float()
    if any(hasattr(module, "num_experts") for module in model.modules()):
        raise ClearheadError(
            f"the memory of {type(model).__name__} with experts cannot be planned: which "
            "of them reads a token depends on the data; measure a step instead"
        )
    if checkpointing:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # 5.17 has no other name
    try:
        with without_data():
            parts = _peak(model, train, gpus)
    except RuntimeError as error:  # also what depends on the data
        reason = str(error).split("\n", 1)[0]
        raise ClearheadError(
            f"the memory of {type(model).__name__} with {train.optimizer} cannot be planned: its "
            f"step fails on tensors without data ({reason}); measure a step instead"
        ) from error
    return parts | {"peak": sum(parts.values())}


def _model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if isinstance(config, ClearheadConfig):
        return OBJECTIVES[objective_of(config)](config)
    return AutoModelForCausalLM.from_config(config)


def _peak(model: Any, train: TrainConfig, gpus: int) -> dict[str, int]:
    """Bytes by part at the peak of a second step, by which the optimizer has its state."""
    from torch.distributed._tools.mem_tracker import MemTracker

    peak: dict[str, int] = {}

    class Peak(MemTracker):
        """Keeps the parts at the peak of one GPU; none of single modules, which would cost time."""

        def _update_peak_stats(self, peak_state: Any) -> None:
            kinds = self._curr_mem_snap.get(torch.device("cpu"), {})
            sizes = {str(getattr(kind, "name", kind)): size for kind, size in kinds.items()}
            now = {
                part: sum(sizes.get(kind, 0) for kind in names) // (gpus if part in _SHARED else 1)
                for part, names in _PARTS.items()
            }
            if sum(now.values()) > sum(peak.values()):
                peak.update(now)

    model.to_empty(device="cpu")
    model.tie_weights()
    model.train()
    optimizer = build_optimizer(model, train)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker = Peak()
    tracker.track_external(model, optimizer)
    ids_BT = torch.zeros(train.batch_size, train.sequence_length, dtype=torch.int64)
    batch = {"input_ids": ids_BT}
    if train.document_masks:
        batch |= {"document_ids": ids_BT.clone(), "position_ids": ids_BT.clone()}
    labels_BT = ids_BT.clone()
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=train.precision != "fp32"):
            loss = _loss(model, batch, labels_BT)
        loss.backward()
        if train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
    return peak


def _loss(model: Any, batch: dict[str, torch.Tensor], labels_BT: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor
    if not isinstance(model, ClearheadForMaskedLM):
        loss = model(**batch, labels=labels_BT, use_cache=False).loss
        return loss
    # As its forward does with the hidden places, whose number depends on the labels' values.
    x_BTC = model.model(**batch).last_hidden_state
    hidden_N = torch.arange(round(SHARE * labels_BT.numel()))
    x_NC = x_BTC.flatten(0, 1).index_select(0, hidden_N)
    labels_N = labels_BT.flatten().index_select(0, hidden_N)
    loss = ops.linear_cross_entropy(x_NC, model.lm_head.weight, labels_N)
    return loss


def record_memory(config: PlanConfig, **_: object) -> list[Line]:
    """Count the bytes of each preset at each length; return their records, which are in
    `config.records` too.

    - `step_bytes`: of all tensors but weights, gradients and the optimizer's, when a training step
      of one text holds most (`training_memory`).
    - `cached_key_bytes`, `cached_bytes`: a token's keys, and its keys and values, at two bytes a
      number, as the model's own forward pass caches them.

    Raises:
        ClearheadError: for a model that is no preset, or that cannot be counted.
    """
    lines: list[Line] = []
    for name in config.models:
        positions = {"max_position_embeddings": max(config.lengths)}
        choose("preset", name, PRESETS)
        model = preset(name, config.size, **positions | config.set)
        train = TrainConfig(batch_size=1, precision="bf16")
        lines.append(
            {
                "kind": "run",
                "run": name,
                "arm": name,
                "preset": name,
                "seed": 0,
                "size": config.size,
                "model": model.to_diff_dict(),
                "parameters": plan(model).parameters,
                "train": {"tokens": 0, "batch_size": 1, "precision": train.precision},
                **provenance(torch.device("cpu")),
            }
        )
        for length in config.lengths:
            step = training_memory(model, replace(train, sequence_length=length))
            keys, values = _cached(model, length)
            for metric, value in (
                ("step_bytes", step["activations"]),
                ("cached_key_bytes", 2 * keys / length),
                ("cached_bytes", 2 * (keys + values) / length),
            ):
                at = {"task": "memory", "length": length}
                found = {"metric": metric, **at, "value": value}
                lines.append({"kind": "measure", "run": name, **found})
    assert config.records is not None
    write_text(config.records, "".join(map(as_line, lines)))
    return lines


def _cached(config: ClearheadConfig, length: int) -> tuple[int, int]:
    """Numbers of keys and of values in the cache after one text of `length`."""
    with torch.device("meta"):
        model: Any = ClearheadForCausalLM(config)
    with without_data(), torch.no_grad():
        ids_BT = torch.zeros(1, length, dtype=torch.int64)
        layers = cache_of(model.to_empty(device="cpu").eval()(ids_BT, use_cache=True)).layers
    return sum(one.keys.numel() for one in layers), sum(one.values.numel() for one in layers)
