"""Peak memory of a training step by part, from one step on tensors without storage."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from clearhead import ops
from clearhead.data.config import SHARE
from clearhead.errors import ClearheadError
from clearhead.experiments.run_setup import OBJECTIVES, objective_of
from clearhead.models import ClearheadConfig, ClearheadForMaskedLM
from clearhead.models.planning import without_data
from clearhead.optim import build_optimizer
from clearhead.train.config import TrainConfig

if TYPE_CHECKING:
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.device_mesh import DeviceMesh

# A part of the bill, and the kinds of memory that PyTorch's trackers tell apart.
_PARTS = {
    "weights": ("PARAM", "BUFFER", "SHARDED_PARAM", "UNSHARDED_PARAM"),
    "gradients": ("GRAD", "SHARDED_GRAD", "UNSHARDED_GRAD"),
    "optimizer": ("OPT",),
    "activations": ("ACT", "TEMP", "OTH", "INP"),
    "communication": ("ALL_GATHER", "REDUCE_SCATTER"),
}


def training_memory(
    config: Any, train: TrainConfig, *, checkpointing: bool = False, gpus: int = 1
) -> Mapping[str, int]:
    """Bytes of tensors on one GPU when a training step holds most, by part.

    Weights, gradients and optimizer are sharded over the GPUs by FSDP2, a layer at a time. The
    step is eager, on the CPU's kernels; `precision` "auto" counts as bf16.

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
        with _mesh(gpus) as mesh, without_data():
            tracker = _step(model, train, mesh)
    except RuntimeError as error:  # also what depends on the data
        reason = str(error).split("\n", 1)[0]
        raise ClearheadError(
            f"the memory of {type(model).__name__} with {train.optimizer} cannot be planned: its "
            f"step fails on tensors without data ({reason}); measure a step instead"
        ) from error
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    found = {str(getattr(kind, "name", kind)): size for kind, size in snapshot.items()}
    parts = {part: sum(found.get(kind, 0) for kind in kinds) for part, kinds in _PARTS.items()}
    return parts | {"peak": found["Total"]}


def _model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if isinstance(config, ClearheadConfig):
        return OBJECTIVES[objective_of(config)](config)
    return AutoModelForCausalLM.from_config(config)


def _step(model: Any, train: TrainConfig, mesh: "DeviceMesh | None") -> "MemTracker":
    """One step after another, so that the optimizer's state is there."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import fully_shard

    class OneProcess(_Whole, MemTracker):
        pass

    class Sharded(_Whole, FSDPMemTracker):
        pass

    if mesh is not None:
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.train()
    optimizer = build_optimizer(model, train)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker: MemTracker
    if mesh is None:
        tracker = OneProcess()
        tracker.track_external(model, optimizer)
    else:
        tracker = sharded = Sharded(model, optimizer)
        sharded.track_inputs(())
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
    return tracker


class _Whole:
    """A tracker without the peaks of single modules, whose number each operation would cost."""

    memory_tracking: Any

    def _update_peak_stats(self, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, {}
        super()._update_peak_stats(peak_state)  # type: ignore[misc]
        self.memory_tracking = modules


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


def _layers(model: Any) -> Iterator[Any]:
    """The modules that repeat: the largest list of them."""
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    yield from max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=())


@contextmanager
def _mesh(gpus: int) -> "Iterator[DeviceMesh | None]":
    """A mesh of processes that do not exist; None where there is one."""
    if gpus == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ClearheadError("memory of several GPUs is planned by one process: leave torchrun out")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (gpus,))
    finally:
        dist.destroy_process_group()
