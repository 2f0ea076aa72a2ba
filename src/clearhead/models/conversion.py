"""Conversion of models between clearhead's format and others, with equal logits."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from transformers import GraniteSWAForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from clearhead.errors import ClearheadError
from clearhead.models.configuration import SLIDING
from clearhead.models.families import FAMILIES
from clearhead.models.families.family import filled
from clearhead.models.inspection import dtype_name
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.models.loading import load_config, resolved
from clearhead.models.serving import served, turns_anew
from clearhead.terminal import say

_TOKENS = 64  # that both read, to be compared
TOLERANCE = 1e-4  # of the logits' norm, that another order of sums may make in float32
_NAMES = ", ".join(family.name for family in FAMILIES.values())
# A window that no text reaches. llama.cpp multiplies it in 32 bits, by up to 256 texts at once.
_BEYOND = 2**20  # tokens
_YARN = ("factor", "original_max_position_embeddings")
# What the converter reads of each kind of scaled positions; of others it warns, and rotates anew.
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_YARN, "low_freq_factor", "high_freq_factor"),
    "yarn": _YARN,
}


def converted(model: Any, *, share: bool = False) -> Any:
    """A model of transformers as a clearhead model, or a clearhead model as one of transformers.

    The weights are copies; with `share` a clearhead model uses its source's own tensors.
    """
    refuse_quantised(model.config)
    _require_sound(model)
    with in_float32(model) as rounded:
        result = rounded(with_equal_logits(model, _convert(model, share=share)))
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        say(
            f"rope_type='dynamic': beyond {model.config.max_position_embeddings} tokens logits are "
            "equal for one text without a cache; in a batch, and with a cache, transformers and "
            "clearhead choose other bases (docs/mechanisms.md)"
        )
    return result


def for_serving(model: Any) -> Any:
    """A clearhead model as one that servers load: of a family of transformers, or `served`.

    A 16-bit model keeps its dtype unless that would change its logits: then it becomes float32.
    """

    def form(model: Any) -> Any:
        with suppress(ClearheadError):  # no family has a place for it
            # A family's model with a dynamic base gives other logits with a cache.
            if not turns_anew(model.config):
                return _convert(model)
        return served(model)

    return _as_servers_load(model, form)


def for_llama_cpp(model: Any) -> Any:
    """A clearhead model as llama.cpp's converter to GGUF reads it, in the dtype of `for_serving`.

    A Llama or Qwen3 is read as it is. A GraniteSWA needs at least one layer with a window, without
    which the runtime aborts, and `no_rope_layers`, the converter's name of layers without position,
    which it would give one. Seen in the llama.cpp of llama-cpp-python 0.3.36.
    """

    def form(model: Any) -> Any:
        if reason := turns_anew(model.config):
            raise ClearheadError(f"llama.cpp has no place for this model: {reason}")
        try:
            theirs = _convert(model)
        except ClearheadError as error:
            raise ClearheadError(f"llama.cpp has no family for this model: {error}") from None
        if reason := _unreadable(theirs):
            raise ClearheadError(f"llama.cpp {reason}: transformers reads that of --for serving")
        if not isinstance(theirs, GraniteSWAForCausalLM):
            return theirs
        config = deepcopy(theirs.config)
        if SLIDING not in config.layer_types:
            config.layer_types[-1] = SLIDING
            config.sliding_window = max(_BEYOND, config.max_position_embeddings)
        config.no_rope_layers = [int(theta != 0) for theta in config.layer_rope_theta]
        return filled(type(theirs), config, theirs.state_dict(), theirs)

    return _as_servers_load(model, form)


def _unreadable(model: Any) -> str | None:
    """Reason why llama.cpp cannot read a model, or reads it as another function; or None."""
    kind, config = type(model).__name__.removesuffix("ForCausalLM"), model.config
    rope = {key for key, value in (config.rope_parameters or {}).items() if value is not None}
    scaling = (config.rope_parameters or {}).get("rope_type", "default")
    unread = sorted(rope - {"rope_type", "rope_theta", *_ROPE.get(scaling, ())})
    if scaling not in _ROPE:
        return f"has no rope_type={scaling!r}"
    if unread:
        return f"reads rope_type={scaling!r} without its {', '.join(unread)}"
    if isinstance(model, GraniteSWAForCausalLM):
        width = model.model.layers[0].self_attn.head_dim
        whole = config.hidden_size == config.num_attention_heads * width
        return None if whole else f"reads a {kind} without its head_dim={width}"
    if getattr(config, "sliding_window", None) is not None:
        return f"reads a {kind} without its window of {config.sliding_window} tokens"
    if isinstance(model, Qwen3ForCausalLM) and config.attention_bias:
        return f"reads a {kind} without the biases of its output projections"
    return None if isinstance(model, LlamaForCausalLM | Qwen3ForCausalLM) else f"has no {kind}"


def _as_servers_load(model: Any, form: Callable[[Any], Any]) -> Any:
    """The model in a form, in its own 16 bits, or in float32 where these would move its logits."""
    if not isinstance(model, ClearheadForCausalLM):
        raise ClearheadError(f"a {type(model).__name__} is served as it is: leave --for out")
    _require_sound(model)
    with in_float32(model) as rounded:
        result = with_equal_logits(model, form(model))
        wide = [(tensor, tensor.data) for tensor in chain(result.parameters(), result.buffers())]
        rounded(result)
        with in_float32(result):
            equal = logit_difference(model, result) <= TOLERANCE
        if not equal:
            for tensor, data in wide:
                tensor.data = data
    return result


@contextmanager
def in_float32(model: Any) -> Iterator[Callable[[Any], Any]]:
    """Widen a model's 16-bit weights while it is converted and compared: sums in another order may
    change logits in 16 bits as much as a wrong conversion would.

    Yields a function that casts another model's weights to the first's dtype and returns it.
    """
    tensors = chain(model.parameters(), model.buffers())
    narrow = [(each, each.dtype) for each in tensors if each.dtype.itemsize == 2]
    name_of, dtype = dtype_name(model), model.dtype

    def rounded(result: Any) -> Any:
        saved = result.state_dict(keep_vars=True) if narrow else {}
        for name, tensor in saved.items():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
                if not bool(tensor.isfinite().all()):
                    raise ClearheadError(
                        f"{name} has weights beyond the range of {name_of}: convert a float32 copy"
                    )
        return result

    for tensor, _ in narrow:
        tensor.data = tensor.data.float()
    try:
        yield rounded
    finally:
        for tensor, own in narrow:
            tensor.data = tensor.data.to(own)


def with_equal_logits(model: Any, result: Any) -> Any:
    """Return `result`, or raise a ClearheadError where its logits are not those of the model."""
    difference = logit_difference(model, result)
    if not difference <= TOLERANCE:  # nor where it is no number
        raise ClearheadError(
            f"the converted {type(model).__name__} gives other logits, by {difference:.2g} of them"
        )
    return result


def imported(model: Any) -> ClearheadForCausalLM:
    """A clearhead model as it is; any other by `converted`, with shared weights."""
    if not isinstance(model, ClearheadForCausalLM):
        return converted(model, share=True)
    _require_sound(model)
    return model


def _require_sound(model: Any) -> None:
    """Refuse weights that are not finite, and a head that is stored beside the embedding to which
    the configuration ties it: transformers leaves the two apart."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ClearheadError(
                f"{name} of this {type(model).__name__} has weights that are not finite"
            )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(model.config, "tie_word_embeddings", False)
    if tied and not torch.equal(head.weight, embedding.weight):
        raise ClearheadError(
            f"the checkpoint of this {type(model).__name__} has a head of its own: set "
            "tie_word_embeddings to false in config.json, or remove the head's weights"
        )


def _convert(model: Any, *, share: bool = False) -> Any:
    if isinstance(model, ClearheadForCausalLM):
        family = next(family for family in FAMILIES.values() if family.suits(model.config))
        return family.exported(model)
    kind = type(model).__name__
    if kind in FAMILIES:
        return FAMILIES[kind].imported(model, share=share)
    raise ClearheadError(
        f"a {kind} cannot be converted: give one of {_NAMES}, or a clearhead model that is one"
    )


def require_convertible(name: str, *, trust_remote_code: bool = False) -> None:
    """Refuse a folder or hub name of a quantised model, before its weights are opened."""
    name = resolved(name)
    refuse_quantised(load_config(name, trust_remote_code=trust_remote_code), name)


def refuse_quantised(config: Any, name: str = "the model") -> None:
    """Raise a ClearheadError for a quantised model, saying how to dequantise it."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = (settings if isinstance(settings, dict) else vars(settings)).get("quant_method")
    raise ClearheadError(
        f"{name} is already quantised ({getattr(method, 'value', method)}): give the one in full "
        'precision, or a copy saved by the program "Dequantise a model" of docs/howto.md'
    )


def logit_difference(model: Any, result: Any, prefix: Sequence[int] = ()) -> float:
    """‖difference‖ / ‖first's‖ of two models' logits on random tokens (Euclidean norms), before
    which the first model reads a prefix, within its sliding window."""
    draw, room = torch.Generator().manual_seed(0), model.config.max_position_embeddings
    if prefix:
        room = min(room, model.config.sliding_window or room) - len(prefix)
    size = (1, min(_TOKENS, room))
    ids_BT = torch.randint(model.config.vocab_size, size, generator=draw).to(model.device)
    before_BN = torch.tensor([list(prefix)], dtype=torch.long, device=model.device)
    with torch.no_grad():
        whole = model.eval()(input_ids=torch.cat([before_BN, ids_BT], 1)).logits.double()
        one, other = whole[:, len(prefix) :], result(input_ids=ids_BT).logits.double()
    length = float(one.norm())
    if not 0 < length < math.inf:
        what = "not finite" if length else "all 0"
        raise ClearheadError(f"this {type(model).__name__} gives logits that are {what} as it is")
    return float((one - other).norm()) / length
