"""How a model is run to be measured: its layers, its limits, its mode, and batches of windows."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError

_WORDS_FOR_POSITION = ("position", "pos_emb", "wpe")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model: its list of `num_hidden_layers` modules.

    Raises:
        ClearheadError: where the model has no such list.
    """
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ClearheadError(
        f"{type(model).__name__} has no list of {count} decoder layers to compile: "
        "train it with compile none"
    )


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers of a Hugging Face causal language model, in order.

    Raises:
        ClearheadError: where the model is an encoder-decoder, or has no list of decoder layers.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ClearheadError(f"{name} is an encoder-decoder: give a decoder-only language model")
    try:
        return decoder_layers(model)
    except ClearheadError:
        raise ClearheadError(
            f"{name} has no list of config.num_hidden_layers decoder layers: "
            "give a decoder-only language model of transformers"
        ) from None


def backbone(model: Any) -> nn.Module:
    """The model without its head; the model itself where transformers knows no such part."""
    return model.base_model


def longest_text(model: Any) -> int | None:
    """The number of learned positions, in tokens; None where the model learns none.

    Found by its table: an embedding named after positions, beside that of the tokens. It must be
    known beforehand, since on a GPU an index out of range ends the process.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is model.get_input_embeddings():
            continue
        rows = module.num_embeddings  # some tables have a few rows more than there are positions
        if any(word in name for word in _WORDS_FOR_POSITION) and rows >= (limit or 0):
            # A table with a row for padding has it before those of the positions (RoBERTa).
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(limit or rows, rows - first)
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no autocast; afterwards every module's mode is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    device = next(model.parameters()).device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def batches(model: Any, windows: Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Stack windows, int64 [T] each, to [B, T] on the model's device; the last may be smaller.

    Raises:
        ClearheadError: no windows, windows of other shapes or lengths, more tokens than the model
            has learned positions, or token ids that the model does not know.
    """
    if batch_size < 1:
        raise ClearheadError(f"batch_size is {batch_size}: it is at least 1")
    held: list[Tensor] = []
    length: int | None = None
    for window in windows:
        if length is None:
            length = _length(model, window)
        if window.shape != (length,):
            raise ClearheadError(
                f"windows must be one-dimensional and of one length: found {[length]} and "
                f"{list(window.shape)}"
            )
        held.append(window)
        if len(held) == batch_size:
            yield _stack(model, held)
            held = []
    if held:
        yield _stack(model, held)
    if length is None:
        raise ClearheadError("no windows to measure on: give at least one")


def _length(model: Any, window: Tensor) -> int:
    length = len(window)
    limit = longest_text(model)
    if limit is not None and length > limit:
        raise ClearheadError(
            f"the model has {limit} learned positions, too few for {length} tokens"
        )
    return length


def _stack(model: Any, windows: list[Tensor]) -> Tensor:
    ids_BT = torch.stack(windows)
    known = model.get_input_embeddings().num_embeddings
    low, high = int(ids_BT.min()), int(ids_BT.max())
    if low < 0 or high >= known:
        raise ClearheadError(
            f"token ids from {low} to {high}, and the model knows 0 to {known - 1}: "
            "use the tokenizer that the model was trained with"
        )
    return ids_BT.to(model.device)


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """Memory that ran out, said in a line with what takes less.

    PyTorch's allocator for CPUs has no error of its own, only words.

    Raises:
        ClearheadError: where memory ran out; other errors pass.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not re.search("can't allocate memory|not enough memory", str(error)):
            raise
        raise ClearheadError(f"out of memory: {advice}") from error
