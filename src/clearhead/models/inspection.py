"""Any Hugging Face model's layers, limits and mode, and batches for it."""

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from clearhead.errors import NOT_FINITE, ClearheadError, NotFinite
from clearhead.models.base_model import ClearheadModel
from clearhead.models.configuration import WINDOW_BEGIN
from clearhead.ops.precision import without_autocast

_WORDS_FOR_POSITION = ("position", "pos_emb", "wpe")


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model: its list of `num_hidden_layers` modules."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    modules = () if getattr(config, "is_encoder_decoder", False) else model.modules()
    for module in modules:
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ClearheadError(
        f"{type(model).__name__} has no list of config.num_hidden_layers decoder layers"
    )


def parameter_count(model: nn.Module) -> int:
    """The number of parameters, shared ones once."""
    return sum(map(Tensor.numel, model.parameters()))


def dtype_name(model: Any) -> str:
    """The name of the dtype of a model's weights."""
    return str(model.dtype).removeprefix("torch.")


def longest_text(model: Any) -> int | None:
    """The number of learned positions, in tokens; None where the model learns none.

    The table is an embedding with a position in its name that does not embed the tokens. Callers
    check the limit first: on a GPU an index out of range ends the process.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    body = model.base_model
    taken = body.prefix_length if isinstance(body, ClearheadModel) else 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is model.get_input_embeddings():
            continue
        rows = module.num_embeddings  # some tables have a few rows more than there are positions
        if any(word in name for word in _WORDS_FOR_POSITION) and rows >= (limit or 0):
            # A table with a row for padding has it before those of the positions (RoBERTa).
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(limit or rows, rows - first) - taken
    return None


def lack_of_positions(model: Any, length: int, name: str = "the model") -> str:
    """The reason why the model cannot tell the positions of `length` tokens apart; "" if it can."""
    limit, kind, body = longest_text(model), "learned positions", model.base_model
    if limit is None and isinstance(body, ClearheadModel) and body.longest is not None:
        limit, kind = body.longest - body.prefix_length, f"positions of {model.config.position!r}"
    if limit is None or length <= limit:
        return ""
    return f"{name} has {limit:,} {kind}, too few for {length:,} tokens"


def require_positions(model: Any, length: int, advice: str, name: str = "the model") -> None:
    """Raise a ClearheadError with `advice` where `lack_of_positions` has a reason."""
    if reason := lack_of_positions(model, length, name):
        raise ClearheadError(f"{reason}: {advice}")


def run_backbone(model: Any, ids_BT: Tensor) -> Any:
    """Run the model without its head and without a cache."""
    body = model.base_model
    known = inspect.signature(body.forward).parameters  # an encoder has no cache to leave unused
    cached = "use_cache" in known or isinstance(body, ClearheadModel)
    return body(input_ids=ids_BT, **({"use_cache": False} if cached else {}))


def generating_plainly(model: Any) -> Any:
    """The model without generation settings such as penalties or beams; its end tokens stay."""
    own = model.generation_config
    tokens = {key: getattr(own, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    return model


def finite(*arguments: Tensor) -> Tensor:
    """Return the last argument, logits [..., V], unchanged, or raise NotFinite for NaN, +∞ or a row
    of −∞ alone; a logits processor for `generate`."""
    logits = arguments[-1]
    if not bool(logits.amax(-1).isfinite().all()):
        raise NotFinite(
            f"the model's logits are {NOT_FINITE}: it has weights that are NaN or infinite, or its "
            "numbers overflow its dtype"
        )
    return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and autocast; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), without_autocast(next(model.parameters())):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def batches(model: Any, windows: Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Stack windows, int64 [T] each and of one length, to [B, T] on the model's device, each begun
    as the model's training windows were; the last batch may be smaller."""
    windows, shape = iter(windows), None
    while batch := list(islice(windows, batch_size)):
        shape = shape or batch[0].shape
        if len(shape) != 1 or any(window.shape != shape for window in batch):
            raise ClearheadError("windows must be one-dimensional and of one length")
        require_positions(model, len(batch[0]), "give shorter texts")
        ids_BT = opened(model, torch.stack(batch))
        check_tokens(model, ids_BT)
        yield ids_BT.to(model.device)
    if shape is None:
        raise ClearheadError("no windows to measure on: give at least one")


def begin_of_windows(model: Any) -> int | None:
    """The first token of every training window (`TrainConfig.begin_windows`); None without one."""
    begin = getattr(model.config, WINDOW_BEGIN, None)
    known = model.get_input_embeddings().num_embeddings
    if begin is not None and not (type(begin) is int and 0 <= begin < known):
        raise ClearheadError(f"{WINDOW_BEGIN} in config.json is {begin!r}, no token of this model")
    return begin


def opened(model: Any, ids: Tensor) -> Tensor:
    """Tokens, int64 [..., T], the first one replaced by `begin_of_windows` where there is one."""
    begin = begin_of_windows(model)
    if begin is None:
        return ids
    ids = ids.clone()
    ids[..., 0] = begin
    return ids


def check_tokens(model: Any, ids: Tensor) -> None:
    """Refuse token ids, int64 of any shape, that the model does not know."""
    known = model.get_input_embeddings().num_embeddings
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        raise ClearheadError(
            f"token ids from {low} to {high}, and the model knows 0 to {known - 1}: use the "
            "tokenizer that the model was trained with"
        )


@contextmanager
def within_memory(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a one-line ClearheadError with `advice`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # a CPU's is recognised by its message
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not re.search("can't allocate memory|not enough memory", str(error)):
            raise
        raise ClearheadError(f"out of memory: {advice}") from error
