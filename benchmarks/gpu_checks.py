"""Models on a GPU: right, eager and compiled, and without T × T scores."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.race import Ratio
from clearhead import ClearheadForCausalLM, ClearheadForMaskedLM, preset
from clearhead.models import presets as names_of_presets
from clearhead.train.compiling import compiled

SHAPE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": 512, "max_position_embeddings": 512}
# One of each kind of attention and block.
KINDS: tuple[str, ...] = (
    "transformer",
    "softmax1",
    "sink",
    "key-value",
    "differential",
    "differential-v2",
    "coca",
)
KINDS += ("alibi", "gated", "sas-p")


@dataclass(frozen=True)
class Setting:
    """The device, whether sizes are a test's, and when the part's time is over."""

    device: torch.device
    toy: bool
    end: float

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that the part still has."""
        return self.end - time.perf_counter()


def presets(setting: Setting) -> Iterator[Ratio]:
    """Every preset in float32 against float64 on the CPU; cached against whole; all gradients."""
    names = list(names_of_presets())
    for name in names[:3] if setting.toy else names:
        if setting.left() < 0:
            yield _missing("presets", name)
            continue
        model = drawn(name, SHAPE)
        ids = torch.randint(0, 512, (2, 130))
        mask = torch.ones_like(ids)
        mask[0, :37] = 0
        with torch.no_grad():
            want = model.double()(ids, attention_mask=mask).logits.float()
        model, ids_there = model.float().to(setting.device), ids.to(setting.device)
        mask_there = mask.to(setting.device)
        with torch.no_grad():
            logits = model(ids_there, attention_mask=mask_there).logits.cpu()
        off = _off(logits[mask.bool()], want[mask.bool()])
        yield _at_most("presets", f"{name}, float32", off, 1e-5)
        model(ids_there, attention_mask=mask_there, labels=ids_there).loss.backward()
        bad = sum(
            p.grad is None or not bool(torch.isfinite(p.grad).all())
            for p in model.parameters()
            if p.requires_grad
        )
        yield _at_most("presets", f"{name}, gradients missing or not finite", bad, 0)
        if isinstance(model, ClearheadForCausalLM):
            yield _at_most("presets", f"{name}, cached", _cached(model.eval(), ids_there), 1e-5)


@torch.no_grad()
def _cached(model: ClearheadForCausalLM, ids: Tensor) -> float:
    cache, parts = None, []
    for part in ids.split((64, 1, 35, 30), 1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    model.generate(ids[:, :20], max_new_tokens=4, do_sample=False)
    return _off(torch.cat(parts, 1), model(ids, use_cache=False).logits)


def gradients(setting: Setting) -> Iterator[Ratio]:
    """Whole models' gradients in bfloat16, compiled against eager, at 2,048 tokens."""
    missing = set(names := KINDS[:2] if setting.toy else KINDS)
    for name, rows in _side_by_side(names, setting):
        missing.discard(name)
        yield from rows
    for name in missing:
        yield _missing("gradients, compiled", name)


def _gradients_of(setting: Setting, name: str) -> list[Ratio]:
    length, width = (64, 128) if setting.toy else (2048, 512)
    shape = SHAPE | {"hidden_size": width, "num_attention_heads": width // 64}
    shape |= {"max_position_embeddings": length, "vocab_size": 512 if setting.toy else 8192}
    torch._dynamo.reset()
    model = drawn(name, shape).to(setting.device).train()
    ids = torch.randint(0, shape["vocab_size"], (2, length), device=setting.device)
    exact = _gradients(model, ids, autocast=False)
    eager = _gradients(model, ids)
    with compiled(model, "blocks"):
        ours = _gradients(model, ids)
    errors = sorted(_off(ours[key], exact[key]) for key in exact)
    plain = sorted(_off(eager[key], exact[key]) for key in exact)
    middle = len(errors) // 2
    # Of a compiled step's rounding no more than half again of an eager one's.
    title, median, worst = "gradients, compiled", 1.5 * plain[middle], 2 * plain[-1] + 0.01
    return [
        _at_most(title, f"{name}, median", errors[middle], median),
        _at_most(title, f"{name}, worst", errors[-1], worst),
    ]


def _side_by_side(names: Sequence[str], setting: Setting) -> Iterator[tuple[str, list[Ratio]]]:
    """Each kind's figures, as they come: one process a kind on a GPU, where compilers are what
    takes the time. Kinds that fail are printed; those out of time are left out."""
    if not setting.cuda:
        yield from ((name, _gradients_of(setting, name)) for name in names)
        return
    # Each process compiles by itself instead of starting a pool as large as the machine.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    pool = ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn"))
    futures = {pool.submit(_gradients_of, setting, name): name for name in names}
    try:
        for future in as_completed(futures, timeout=max(1.0, setting.left())):
            name = futures[future]
            if error := future.exception():
                print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            else:
                yield name, future.result()
    except TimeoutError:
        print("out of time:", *(name for f, name in futures.items() if not f.done()), flush=True)
    finally:
        del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)


def _gradients(model: Any, ids: Tensor, autocast: bool = True) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {k: p.grad.float().clone() for k, p in model.named_parameters() if p.grad is not None}


def scores(setting: Setting) -> Iterator[Ratio]:
    """Operations of a compiled step that read or write T × T numbers, by PyTorch's profiler."""
    length = 160 if setting.toy else 2048
    shape = SHAPE | {"max_position_embeddings": length}
    for name in ("transformer", "sink", "differential"):
        torch._dynamo.reset()
        model = drawn(name, shape).to(setting.device).train()
        ids = torch.randint(0, 512, (2, length), device=setting.device)
        with compiled(model, "blocks"):
            _gradients(model, ids)
            with torch.profiler.profile(record_shapes=True) as profile:
                _gradients(model, ids)
        squares = [
            event.name
            for event in profile.events()
            for one in event.input_shapes or ()
            if isinstance(one, list) and len(one) > 1 and one[-1] == one[-2] == length
        ]
        # A CPU's compiled tiles of short texts are T × T where T is one tile's.
        yield _at_most("T × T scores", name, len(squares), 0 if setting.cuda else None)


def drawn(name: str, shape: dict[str, Any]) -> ClearheadForCausalLM | ClearheadForMaskedLM:
    """A preset whose parameters are all random: no path is closed by a zero."""
    torch.manual_seed(0)
    config = preset(name, **shape)
    kind = ClearheadForMaskedLM if config.direction == "bidirectional" else ClearheadForCausalLM
    model: Any = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model  # type: ignore[no-any-return]


def _off(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm().clamp_min(1e-12))


def _at_most(name: str, ours: str, value: float, bound: float | None) -> Ratio:
    return Ratio(name=name, ours=ours, peer="", ratio=float(value), bound=bound, seconds={})


def _missing(name: str, ours: str) -> Ratio:
    return _at_most(name, f"{ours} (out of time)", float("inf"), 0.0)
