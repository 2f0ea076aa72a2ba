"""A whole training step against transformers' models of the same shape."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from benchmarks.race import Ratio, faster_paths
from benchmarks.timing import take_turns
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.train import TrainConfig, precision
from clearhead.train.compiling import compiled

# The shapes of the figures in docs/performance.md, and rows of a step: what fills the device.
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 704,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
    },
    "cuda": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "vocab_size": 32_768,
        "max_position_embeddings": 1024,
    },
}
ROWS = {"cpu": 8, "cuda": 16}

# Models compiled here stay so until the process ends; a context let go would undo it at once.
FOR_LIFE = ExitStack()


def training_step(rounds: int) -> Iterator[Ratio]:
    """A whole training step against transformers' Llama and DiffLlama, each by its faster path."""
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = SHAPES[best_device().type]
    peers = {**shape, "tie_word_embeddings": True, "use_cache": False}
    makers: dict[str, Callable[[], nn.Module]] = {
        "transformer": lambda: ClearheadForCausalLM(preset("transformer", **shape)),
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**peers)),
        "differential": lambda: ClearheadForCausalLM(preset("differential", **shape)),
        "DiffLlama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**peers)),
    }
    steps = {
        f"{name}, {path}": _prepared(make(), path)
        for name, make in makers.items()
        for path in ("eager", "compiled")
    }
    seconds = take_turns(steps, rounds)
    for ours, peer, bound in (("transformer", "Llama", 0.85), ("differential", "DiffLlama", 0.95)):
        yield faster_paths("training-step", ours, peer, bound, seconds)


def _prepared(model: nn.Module, path: str) -> Callable[[], None]:
    """One optimizer step by AdamW; ours compiles its layers, a peer the whole model."""
    model.to(best_device()).train()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-4))
    device = best_device()
    shape = SHAPES[device.type]
    rows = ROWS[device.type], shape["max_position_embeddings"]
    ids = torch.randint(0, shape["vocab_size"], rows, device=device)
    if path == "compiled":
        if isinstance(model, ClearheadForCausalLM):
            FOR_LIFE.enter_context(compiled(model, "blocks"))
        else:
            model.compile()
    return optimizer_step(model, optimizer, ids)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor | None = None,
) -> Callable[[], None]:
    """A whole step under bf16 autocast; the labels are the tokens themselves unless given."""
    labels = ids if labels is None else labels

    def step() -> None:
        with precision.autocast("bf16", ids.device):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
