"""Figures of a GPU: training steps, the loss, attention by kernel, and decoding."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import kernels
from benchmarks.gpu_checks import Setting
from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from clearhead import ClearheadForCausalLM, ops, preset
from clearhead.ops import dispatch
from clearhead.ops.requests import PLAIN, Call
from clearhead.ops.visibility import Visibility
from clearhead.train.compiling import compiled

PEAK = 989e12  # FLOP/s of an H100 in bfloat16
LLAMA = "Llama"


class Size(NamedTuple):
    """A model's shape, the rows of a step, and what is measured: bounds of time, by preset.

    `of` is the preset or peer whose time they are of.
    """

    shape: dict[str, Any]
    rows: int
    of: str
    bounds: dict[str, float | None]


def _shape(width: int, depth: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    shape |= {"intermediate_size": ffn, "vocab_size": 32_768, "max_position_embeddings": 2048}
    return shape | more


EIGHT = dict.fromkeys(("softmax1", "sink", "coca", "gated", "xsa"), 1.08)
PAPER = {"mlp": "relu", "vocab_size": 50_000, "max_position_embeddings": 128}
SIZES = {
    "350M": Size(_shape(1024, 24, 16, 2816), 8, LLAMA, {"transformer": 1.0}),
    "350M, presets": Size(
        _shape(1024, 24, 16, 2816),
        8,
        "transformer",
        {"differential": 1.35, "differential-v2": 1.4, **EIGHT},
    ),
    "paper": Size(_shape(768, 18, 12, 3072, **PAPER), 128, "transformer", {"sas-p": 0.95}),
    "125M": Size(_shape(768, 12, 12, 2048), 16, LLAMA, {"transformer": 1.0}),
    "1.3B": Size(_shape(2048, 24, 32, 5632), 4, LLAMA, {"transformer": 1.0}),
}
TINY = _shape(64, 2, 2, 96, vocab_size=128, max_position_embeddings=32)


class Step(NamedTuple):
    """Seconds of a training step, the peak of its memory, and its model's FLOPs a second."""

    seconds: list[float]
    peak: int
    flops: float


def steps(setting: Setting) -> Iterator[Ratio]:
    """Compiled training steps in bfloat16, of Llama's or of `transformer`'s time and memory."""
    done: dict[tuple[str, str], Step] = {}
    for title, size in list(SIZES.items())[: 1 if setting.toy else None]:
        size = size._replace(shape=TINY, rows=2) if setting.toy else size
        base = title.split(",")[0]
        for name in (size.of, *size.bounds):
            if (base, name) in done:
                continue
            if setting.left() < 8:
                print(f"out of time: {title}, {name}", flush=True)
                continue
            step = done[base, name] = _measured(name, size, setting)
            tokens = size.rows * size.shape["max_position_embeddings"]
            rate = tokens / min(step.seconds)
            print(f"{base} {name}: {rate:,.0f} tokens/s, {step.peak / 2**30:.1f} GiB", flush=True)
        for name, bound in size.bounds.items():
            if (base, name) not in done or (base, size.of) not in done:
                continue
            own, peer = done[base, name], done[base, size.of]
            seconds = {name: own.seconds, size.of: peer.seconds}
            yield ratio_of(f"training step, {base}", name, size.of, bound, seconds)
            if size.of == LLAMA and setting.cuda:
                memory, title = own.peak / peer.peak, f"peak memory, {base}"
                yield Ratio(name=title, ours=name, peer=LLAMA, ratio=memory, bound=1.05, seconds={})
                share, aim = PEAK / own.flops, 2.5 if base == "350M" else None
                title = f"peak FLOP/s of the model's, {base}"
                yield Ratio(name=title, ours=name, peer="", ratio=share, bound=aim, seconds={})
                yield from _planned(base, name, size, own.peak)


def _planned(base: str, name: str, size: Size, peak: int) -> Iterator[Ratio]:
    """The peak beside `clearhead plan`'s, where what that needs is installed."""
    try:
        from clearhead.lab.bill import training_memory
        from clearhead.train import TrainConfig
    except ImportError as error:
        print(f"no plan: {error}")
        return
    length = size.shape["max_position_embeddings"]
    train = TrainConfig(batch_size=size.rows, sequence_length=length, learning_rate=1e-4)
    planned = training_memory(preset(name, **size.shape), train)["peak"]
    title, ratio = f"peak memory, {base}", peak / planned
    yield Ratio(name=title, ours=name, peer="plan", ratio=ratio, bound=None, seconds={})


def _measured(name: str, size: Size, setting: Setting) -> Step:
    torch._dynamo.reset()
    if setting.cuda:
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    open_contexts = ExitStack()
    model: Any
    with setting.device:  # random numbers of a billion parameters take a CPU long
        if name == LLAMA:
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(**size.shape, tie_word_embeddings=True, use_cache=False)
            model = LlamaForCausalLM(config)
        else:
            model = ClearheadForCausalLM(preset(name, **size.shape))
    model.to(setting.device).train()
    if name == LLAMA:
        for layer in model.model.layers:
            layer.compile()
    else:
        open_contexts.enter_context(compiled(model, "blocks"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    length, vocabulary = size.shape["max_position_embeddings"], size.shape["vocab_size"]
    ids = torch.randint(0, vocabulary, (size.rows, length), device=setting.device)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    if setting.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = take_turns({name: step}, 8, unmeasured=1)[name]
    peak = torch.cuda.max_memory_allocated() if setting.cuda else 0
    weights = sum(p.numel() for p in model.parameters())  # the head is the embedding
    layers, width = size.shape["num_hidden_layers"], size.shape["hidden_size"]
    flops = 6 * weights + 6 * layers * width * length  # causal: half of 12 L C T
    rate = flops * size.rows * length / sorted(seconds)[len(seconds) // 2]
    open_contexts.close()
    return Step(seconds, peak, rate)


def loss(setting: Setting) -> Iterator[Ratio]:
    """The loss and its gradients, of all logits compiled; and the memory that it adds."""
    rows, vocabulary, width = (256, 128, 16) if setting.toy else (16_384, 32_768, 1024)
    device = setting.device
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device) * 0.02).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), device=device)

    def whole(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = (x @ weight.to(x.dtype).T).float()
        return F.cross_entropy(logits, target, reduction="sum")

    peer = "all logits, compiled"
    runs: dict[str, Callable[..., Tensor]] = {
        "eager": ops.linear_cross_entropy,
        "compiled": torch.compile(ops.linear_cross_entropy),
    }
    sides: dict[str, Callable[[], object]] = {
        name: partial(_loss_step, run, x, weight, target)
        for name, run in {**runs, peer: torch.compile(whole)}.items()
    }
    seconds = take_turns(sides, 7)
    for name in runs:
        two = {side: seconds[side] for side in (name, peer)}
        yield ratio_of("loss", name, peer, 1.1, two)
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            sides[name]()
            added = (torch.cuda.max_memory_allocated() - before) / 2**30
            title = "loss, added GiB"
            yield Ratio(name=title, ours=name, peer="", ratio=added, bound=0.5, seconds={})


def _loss_step(run: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor) -> None:
    torch.autograd.grad(run(x, weight, target), (x, weight))


def attention(setting: Setting) -> Iterator[Ratio]:
    """A layer forward and backward by length: the kernel chosen, and every other that serves."""
    lengths, tokens = ((64,), 128) if setting.toy else ((2048, 8192, 32_768), 16_384)
    bounds = {"softmax": 1.02, "softmax-1": 1.1, "sink": 1.15}
    for length in lengths:
        batch = max(1, tokens // length)
        q, k, v = (kernels._drawn(batch, 16, length, 64).requires_grad_() for _ in range(3))
        sides = {kernels.PEER: kernels._pass(kernels._softmax, q, k, v)}
        sink = torch.zeros(16, device=setting.device, requires_grad=True)
        for title, given in {"softmax": None, "softmax-1": 0.0, "sink": sink}.items():
            own = partial(ops.attend, sink=given)
            sides[title] = kernels._pass(own, q, k, v)
            for name in _others(q, k, v, given is not None):
                sides[f"{title} by {name}"] = kernels._pass(partial(own, kernel=name), q, k, v)
        for title in ("documents", "padding", "V1", "V2"):
            sides[title] = kernels._pass(kernels._variants(batch, 16, length)[title], q, k, v)
        seconds = take_turns(sides, 5)
        for title in sides:
            if title != kernels.PEER and setting.left() > 0:
                two = {side: seconds[side] for side in (title, kernels.PEER)}
                bound = bounds.get(title)
                yield ratio_of(f"attention, T {length}", title, kernels.PEER, bound, two)


def _others(q: Tensor, k: Tensor, v: Tensor, sink: bool) -> list[str]:
    """The kernels of this device that serve the request, but for tiles of long texts."""
    arguments: Any = dispatch.arguments_of(Call(q, k, v, 1.0, Visibility()), sink=sink)
    asked = dispatch.request(*arguments)
    long = q.shape[2] > 2048
    return [
        name
        for name, kernel in dispatch.KERNELS.items()
        if kernel.device in (None, asked.device)
        and PLAIN in kernel.kinds
        and kernel.run.refuses(asked) is None
        and not (name == "tiles" and long)
    ]


def decoding(setting: Setting) -> Iterator[Ratio]:
    """A step's attention over a cache, with `split-decode` and without; a model's step."""
    caches = (256,) if setting.toy else (4096, 16_384, 65_536)
    lam = torch.tensor(0.3, device=setting.device)
    for batch in (1,) if setting.toy else (1, 32):
        for keys in caches:
            q = kernels._drawn(batch, 16, 1, 64)
            k, v = (kernels._drawn(batch, 16, keys, 64).contiguous() for _ in range(2))
            mask = torch.ones(batch, keys, dtype=torch.bool, device=setting.device)
            t = k[..., :32].contiguous()
            sides = {
                kernels.PEER: kernels._step(F.scaled_dot_product_attention, q, k, v),
                "softmax": kernels._step(ops.attend, q, k, v),
                "softmax, padded": kernels._step(ops.attend, q, k, v, key_mask=mask),
                "softmax-1": kernels._step(ops.attend, q, k, v, sink=0.0),
                "V1": kernels._step(kernels._differential, q, k, v, lam=lam),
                "CoCA": kernels._step(ops.attend_unrotated, q, t, v, **kernels._collinear(keys)),
            }
            padded = mask[:, None, None]
            other = partial(F.scaled_dot_product_attention, attn_mask=padded)
            sides["PyTorch softmax, padded"] = kernels._step(other, q, k, v)
            sides["V1 by products"] = kernels._step(
                kernels._differential, q, k, v, lam=lam, kernel="products"
            )
            seconds = take_turns(sides, 5)
            aims = {"softmax": 1.02, "V1": 1.1, "CoCA": 0.9 if keys >= 16_384 else None}
            for title in sides:
                if title != kernels.PEER:
                    two = {side: seconds[side] for side in (title, kernels.PEER)}
                    name = f"decoding, {batch} × {keys} keys"
                    yield ratio_of(name, title, kernels.PEER, aims.get(title), two)
    if not setting.toy:
        yield from kernels._steps(9)


def generation(setting: Setting) -> Iterator[Ratio]:
    """`generate` with a static cache, whose steps transformers compiles on a GPU, of Llama's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = TINY if setting.toy else SIZES["350M"].shape | {"num_hidden_layers": 4}
    tokens = 4 if setting.toy else 128
    options: dict[str, Any] = {"cache_implementation": "static", "do_sample": False}
    options |= {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    ids = torch.ones(1, 16, dtype=torch.long, device=setting.device)
    options["attention_mask"] = torch.ones_like(ids)
    names = LLAMA, "transformer", "differential", "coca"
    sides: dict[str, Callable[[], object]] = {}
    for name in names:
        if setting.left() < 8:
            print(f"out of time: generation, {name}", flush=True)
            break
        model: Any
        if name == LLAMA:
            model = LlamaForCausalLM(LlamaConfig(**shape))
        else:
            model = ClearheadForCausalLM(preset(name, **shape))
        model = model.to(setting.device, torch.bfloat16).eval()
        sides[name] = partial(model.generate, ids, **options)
        sides[name]()  # compiles
    seconds = take_turns(sides, 3)
    for name in list(sides)[1:]:
        two = {side: seconds[side] for side in (name, LLAMA)}
        yield ratio_of("generation, static cache", name, LLAMA, 1.15, two)
