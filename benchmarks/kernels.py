"""Attention's kernels by length, and steps of decoding: figures of a GPU, or of a CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from clearhead import ops
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.loading import best_device
from clearhead.ops.visibility import Visibility

# Tokens of a batch, lengths, widths of a head, and channels of all heads.
SHAPES = {
    "cuda": (16_384, (2048, 4096, 8192, 16_384, 32_768), (64, 128), 1024),
    "cpu": (1024, (512, 1024), (64,), 256),
}
CACHES = {"cuda": ((1, 32), (4096, 16_384, 65_536)), "cpu": ((1,), (256, 2048))}
MODEL: dict[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50_000},
    **{"num_attention_heads": 12, "intermediate_size": 2048},
}
PEER = "PyTorch softmax"
# Of the peer's time, by width where that matters: what issue and documentation promise on an H200.
BOUNDS = {"softmax": 1.05, "softmax-1": 1.1, "sink": 1.1, "documents": 1.11, "padding": 1.25}
BOUNDS |= {"V1": 2.1, "V2": 2.1}
# The same of a step's attention; CoCA's half keys count from 16 K.
STEPS = {"softmax": 1.05, "V1": 1 / 0.95, "CoCA": 1 / 1.2}


def lengths(rounds: int) -> Iterator[Ratio]:
    """Attention forward and backward, bf16, causal, against PyTorch's of the same width."""
    tokens, of_lengths, widths, channels = SHAPES[best_device().type]
    for width in widths:
        for length in of_lengths:
            batch, heads = max(1, tokens // length), channels // width
            q, k, v = (_drawn(batch, heads, length, width).requires_grad_() for _ in range(3))
            sides = {PEER: _pass(_softmax, q, k, v)}
            for name, function in _variants(batch, heads, length).items():
                sides[name] = _pass(function, q, k, v)
            seconds = take_turns(sides, rounds)
            for name in sides:
                if name != PEER:
                    title = f"attention, D {width}, T {length}"
                    two = {side: seconds[side] for side in (name, PEER)}
                    yield ratio_of(title, name, PEER, BOUNDS[name], two)


def decoding(rounds: int) -> Iterator[Ratio]:
    """A step's attention over a cache, then a model's whole step against transformers' Llama."""
    batches, caches = CACHES[best_device().type]
    lam = torch.tensor(0.3, device=best_device())
    for batch in batches:
        for length in caches:
            q = _drawn(batch, 16, 1, 64)
            k, v = (_drawn(batch, 16, length, 64).contiguous() for _ in range(2))
            t, collinear = k[..., :32].contiguous(), _collinear(length)
            sides = {
                PEER: _step(nn.functional.scaled_dot_product_attention, q, k, v),
                "softmax": _step(ops.attend, q, k, v),
                "V1": _step(_differential, q, k, v, lam=lam),
                "CoCA": _step(ops.attend_unrotated, q, t, v, **collinear),
            }
            seconds = take_turns(sides, rounds)
            for name, bound in STEPS.items():
                aimed = None if name == "CoCA" and length < 16_384 else bound
                two = {side: seconds[side] for side in (name, PEER)}
                yield ratio_of(f"decoding, {batch} × {length} keys", name, PEER, aimed, two)
            del k, v, t, sides
    yield from _steps(rounds)


def _step(function: Callable[..., Any], *inputs: Any, **options: Any) -> Callable[[], None]:
    """Eight calls; on a GPU as a graph, for a step of a model is one."""

    @torch.no_grad()
    def step() -> None:
        for _ in range(8):
            function(*inputs, **options)

    return _graph(step) if torch.cuda.is_available() else step


def _graph(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: its kernels' time, without Python's."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()  # kernels prove themselves and are compiled
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    kept = graph, step  # a graph reads the memory of the step's inputs, and holds none of it
    return lambda: kept[0].replay()


def _collinear(keys: int) -> dict[str, Any]:
    """What CoCA's attention takes beside query, t and value."""
    device = best_device()
    frequency = 1e4 ** -(torch.arange(0, 64, 2, device=device) / 64)

    def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, **options: Any) -> Tensor:
        return ops.attend(q, k, v, **visibility._asdict(), **options)

    rotation = ops.Rotation(torch.arange(keys, device=device)[None], frequency)
    plain = {"form": "exact", "sink": None, "scale": 0.125, "visibility": Visibility()}
    return {"rotation": rotation, "attend": attend, **plain}


def _steps(rounds: int) -> Iterator[Ratio]:
    from transformers import LlamaConfig, LlamaForCausalLM

    bounds = {"transformer": 1.05, "differential": 1.15, "coca": 1.15}
    models: dict[str, Any] = {"Llama": LlamaForCausalLM(LlamaConfig(**MODEL))}
    models |= {name: ClearheadForCausalLM(preset(name, **MODEL)) for name in bounds}
    ids = torch.randint(0, MODEL["vocab_size"], (1, 256), device=best_device())

    def decoder(model: Any) -> Callable[[], None]:
        model.to(best_device(), torch.bfloat16).eval()
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values

        @torch.no_grad()
        def step() -> None:
            for _ in range(8):
                model(ids[:, :1], past_key_values=cache)
            cache.crop(-8)

        return step

    seconds = take_turns({name: decoder(model) for name, model in models.items()}, rounds)
    for name, bound in bounds.items():
        two = {side: seconds[side] for side in (name, "Llama")}
        yield ratio_of("decoding, 8 tokens", name, "Llama", bound, two)


def _drawn(*shape: int) -> Tensor:
    """[B, H, T, D] as a layer has them: tokens first in memory."""
    batch, heads, length, width = shape
    x = torch.randn(batch, length, heads, width, device=best_device(), dtype=torch.bfloat16)
    return x.transpose(1, 2)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _variants(batch: int, heads: int, length: int) -> dict[str, Callable[..., Tensor]]:
    at = torch.arange(length, device=best_device()).expand(batch, -1)
    segments = (at * 4 // length).int()
    mask = at >= length // 8
    sink = torch.zeros(heads, device=best_device(), requires_grad=True)
    lam = torch.tensor(0.3, device=best_device(), requires_grad=True)
    by_token = torch.rand(batch, heads, length, 1, device=best_device())

    variants: dict[str, Callable[..., Tensor]] = {
        "softmax": lambda q, k, v: ops.attend(q, k, v),
        "softmax-1": lambda q, k, v: ops.attend(q, k, v, sink=0.0),
        "sink": lambda q, k, v: ops.attend(q, k, v, sink=sink),
        "documents": lambda q, k, v: ops.attend(q, k, v, segments=segments),
        "padding": lambda q, k, v: ops.attend(q, k, v, key_mask=mask),
        "V1": partial(_differential, lam=lam),
        "V2": lambda q, k, v: ops.differential_v2(torch.cat([q, q], 1), k, v, by_token),
    }
    return variants


def _differential(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return ops.differential(q, k, v, norm_weight=None, norm_eps=None, gain=1.0, **options)


def _pass(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(function(*inputs).sum(), inputs)

    return _graph(step) if torch.cuda.is_available() else step
