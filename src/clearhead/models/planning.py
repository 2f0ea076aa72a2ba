"""Costs of a configuration before any weight exists: parameters, FLOPs, bytes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from clearhead.errors import ClearheadError
from clearhead.models.base_model import ClearheadModel
from clearhead.models.configuration import ClearheadConfig
from clearhead.models.inspection import lack_of_positions, longest_text, parameter_count
from clearhead.models.pretrained import cache_of
from clearhead.nn import REGISTRY
from clearhead.ops.visibility import Visibility
from clearhead.terminal import hushed

_COUNTING = "clearhead_plan"  # the key of an attention implementation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of one model.

    Attributes:
        parameters: all of them and the head's, a tied matrix once.
        non_embedding_parameters: without the token and position embeddings and the head.
        forward_flops: multiply-adds × 2 of one token's forward pass, in a sequence of `length`.
        cache_bytes: key-value cache of a text of `length`, at two bytes a number, over its tokens:
            a sliding layer holds no more than its window less one; 0 where there is none, as every
            token sees the whole text.
        length: the sequence length counted with.
    """

    parameters: int
    non_embedding_parameters: int
    forward_flops: float
    cache_bytes: float
    length: int


def plan(config: Any, *, length: int | None = None) -> Plan:
    """Count on the meta device; `length` defaults to the model's own positions.

    Args:
        config: clearhead's, or that of a causal language model of transformers'.

    Raises:
        ClearheadError: for a model whose operations depend on its data, more tokens than it has
            learned positions, or a configuration that names no length where none is given.
    """
    if not isinstance(config, ClearheadConfig):
        return _measured(config, length)
    with torch.device("meta"):
        model = ClearheadModel(config)  # whatever its direction; a head has vocabulary × width
    length = _length(model, length)
    output = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else output
    total = head + parameter_count(model)
    embedding, linear = (
        sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
        for kind in (torch.nn.Embedding, torch.nn.Linear)
    )
    flops, cache = 2.0 * (output + linear), 0.0
    for index in range(config.num_hidden_layers):
        layer = config.layer(index)
        window = length + 1 if layer.sliding_window is None else layer.sliding_window
        held = min(1.0, (window - 1) / length)  # of the text, as transformers' caches drop keys
        for declaration in REGISTRY.of(layer).values():
            flops += declaration.flops(layer, length)
            if layer.direction == "causal":
                cache += 2 * declaration.cache(layer) * held
    return Plan(
        parameters=total,
        non_embedding_parameters=total - embedding - head,
        forward_flops=flops,
        cache_bytes=cache,
        length=length,
    )


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors without storage. What fails on them is told in one line: PyTorch logs a traceback."""
    quiet = hushed("torch._subclasses.fake_tensor", logging.CRITICAL)
    with quiet, FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _length(model: Any, given: int | None) -> int:
    """The length given, or the model's own, if it has room for it."""
    length = given
    if length is None:  # RoBERTa's limit is below its max_position_embeddings
        length = longest_text(model) or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise ClearheadError(
            f"the configuration of {model.config.model_type} names no length: give one (--context)"
        )
    if reason := lack_of_positions(model, length):
        raise ClearheadError(
            f"{reason}: give a shorter length, or a configuration with more max_position_embeddings"
        )
    return int(length)


def _measured(config: Any, length: int | None) -> Plan:
    """The costs of another library's model, from a forward pass on tensors without storage."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config)).to(torch.bfloat16)
    length = _length(model, length)
    weights = {id(p): p.numel() for p in model.parameters()}
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    if (head := model.get_output_embeddings()) is not None:
        tables.append(head)
    embeddings = {id(p): p.numel() for table in tables for p in table.parameters()}
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")  # products that the counter knows
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
    of_attention = _counting_attention(model)
    try:
        with without_data(), torch.no_grad(), counter:
            ids_BT = torch.zeros(1, length, dtype=torch.int64)
            out = model.to_empty(device="cpu").eval()(ids_BT, use_cache=True)
    except RuntimeError as error:  # also what depends on the data
        reason = str(error).split("\n", 1)[0]
        raise ClearheadError(
            f"{config.model_type} cannot be planned: its forward pass fails on tensors without "
            f"data ({reason}): its settings do not fit each other, or what it computes depends on "
            "its data"
        ) from error
    cache = cache_of(out)
    if cache is None and getattr(out, "cache_params", None) is not None:
        raise ClearheadError(
            f"{config.model_type} keeps a state in place of keys and values, which is not planned: "
            "give a model with attention"
        )
    held = (each for layer in getattr(cache, "layers", ()) for each in (layer.keys, layer.values))
    return Plan(
        parameters=sum(weights.values()),
        non_embedding_parameters=sum(weights.values()) - sum(embeddings.values()),
        forward_flops=(counter.get_total_flops() + sum(of_attention)) / length,
        cache_bytes=2 * sum(each.numel() for each in held if each is not None) / length,
        length=length,
    )


def _counting_attention(model: Any) -> list[float]:
    """The FLOPs of each attention that `model` then runs, over the keys that a token sees.

    Its own implementations are given a mask of all keys, and may multiply what it hides. A model
    that does not look its attention up runs its own, whose products the counter sees whole.
    """
    found: list[float] = []

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        seen = Visibility(bool(causal), options.get("sliding_window")).mean_count(k.shape[-2])
        found.append(2.0 * prod(q.shape[:-1]) * seen * (q.shape[-1] + v.shape[-1]))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None

    AttentionInterface.register(_COUNTING, attend)
    AttentionMaskInterface.register(_COUNTING, lambda *arguments, **options: None)
    with hushed("transformers"):  # which models run their own is not the user's concern
        model.set_attn_implementation(_COUNTING)
    return found


def _attention_flops(
    q: Any, k: Any, v: Any, dropout: float = 0.0, is_causal: bool = False, **others: Any
) -> float:
    """q kᵀ and p v of attention, from shapes; over the visible half where it is causal."""
    seen = (k[-2] + 1) / 2 if is_causal else k[-2]
    return 2.0 * prod(q[:-1]) * seen * (q[-1] + v[-1])
