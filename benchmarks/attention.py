"""One layer of attention, mechanism by mechanism, against the baseline's; memory; cache bytes."""

import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race import Ratio, faster_paths, in_new_process
from benchmarks.timing import take_turns
from clearhead import ops
from clearhead.models import ClearheadConfig, ClearheadForCausalLM, plan, preset
from clearhead.models.loading import best_device
from clearhead.nn.attention import Attention
from clearhead.train import precision

HIDDEN, HEADS = 256, 8
TOKENS = {"cpu": 4096, "cuda": 65_536}  # what fills the device
BOUNDS = {
    "softmax1": 1.1,
    "coca": 1.1,
    "coca-strict": 1.1,
    "coca-slack": 1.1,
    "differential": 2.1,
    "differential-v2": 2.1,
}
LONG = 16_384


def kernel(rounds: int) -> Iterator[Ratio]:
    """Forward and backward of softmax-1 against PyTorch's own softmax attention."""
    shape = (_tokens() // 512, HEADS, 512, 32)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": best_device()}
    q, k, v = (torch.randn(shape, **options, requires_grad=True) for _ in range(3))

    def run(function: Callable[..., Tensor]) -> Callable[[], None]:
        def step() -> None:
            function(q, k, v).sum().backward()
            q.grad = k.grad = v.grad = None

        return step

    def softmax1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attend(q, k, v, sink=0.0)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    seconds = take_turns(
        {
            "softmax-1, eager": run(softmax1),
            "softmax-1, compiled": run(torch.compile(softmax1)),
            "PyTorch softmax, eager": run(softmax),
            "PyTorch softmax, compiled": run(torch.compile(softmax)),
        },
        rounds,
    )
    yield faster_paths("kernel", "softmax-1", "PyTorch softmax", 1.1, seconds)


def layers(rounds: int) -> Iterator[Ratio]:
    """Forward and backward of one layer of attention, projections and all, and what it keeps."""
    for length in (512, 2048):
        for mode in ("bf16", "fp32"):
            torch._dynamo.reset()
            sides = {
                f"{name}, {path}": _layer_step(name, length, mode, path)
                for name in ("transformer", *BOUNDS)
                for path in ("eager", "compiled")
            }
            seconds = take_turns(sides, rounds)
            for name, bound in BOUNDS.items():
                title = f"attention-layer, T {length}, {mode}"
                yield faster_paths(title, name, "transformer", bound, seconds)
    coca, rope = (plan(preset(name)).cache_bytes for name in ("coca", "transformer"))
    yield Ratio(
        name="cache",
        ours="coca, bytes a token",
        peer="transformer",
        ratio=coca / rope,
        bound=0.75,
        seconds={},
    )


def _tokens() -> int:
    return TOKENS[best_device().type]


def memory(rounds: int) -> Iterator[Ratio]:
    """The peak of a layer of two heads at 16,384 tokens, against its T × T scores in float32.

    Each in a process of its own, since a high-water mark never falls; the mark before the layer
    runs is taken off. The allocator is told to give back what is freed: otherwise its luck with
    tiles of growing size would be measured.
    """
    square = 2 * LONG * LONG * 4.0
    for name in ("transformer", *BOUNDS):
        held = in_new_process("attention.peak", name, MALLOC_MMAP_THRESHOLD_=str(2**20))
        yield Ratio(
            name=f"memory, T {LONG}",
            ours=f"{name}, bytes at the peak",
            peer="its T × T scores in float32",
            ratio=held / square,
            bound=0.5,
            seconds={},
        )


def peak(name: str) -> int:
    """Bytes that a layer's forward and backward pass adds to the high-water mark.

    On a CPU that of this process, on CUDA that of the tensors.
    """
    config = preset(name, hidden_size=16, num_attention_heads=2, max_position_embeddings=LONG)
    _forward_backward(Attention(config.layer(0)), config, 256, "bf16")()  # what loads only once
    step = _forward_backward(Attention(config.layer(0)), config, LONG, "bf16", batch=1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - held
    before = _resident()
    step()
    return _resident() - before


def _resident() -> int:
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _layer_step(name: str, length: int, mode: str, path: str) -> Callable[[], None]:
    config = preset(
        name, hidden_size=HIDDEN, num_attention_heads=HEADS, max_position_embeddings=length
    )
    module = Attention(config.layer(1))
    if path == "compiled":
        module.compile()
    return _forward_backward(module, config, length, mode, batch=_tokens() // length)


def _forward_backward(
    module: nn.Module, config: ClearheadConfig, length: int, mode: str, batch: int = 1
) -> Callable[[], None]:
    module.to(best_device())
    model = ClearheadForCausalLM(config).model.to(best_device())
    positions = torch.arange(length, device=best_device())[None]
    tables = model.position.tables(positions, positions)
    x = torch.randn(batch, length, config.hidden_size, device=best_device(), requires_grad=True)

    def step() -> None:
        with precision.autocast(mode, x.device):  # type: ignore[arg-type]
            out = module(x, tables=tables)
        out.sum().backward()
        module.zero_grad(set_to_none=True)
        x.grad = None

    return step
