"""Records that look like those of a real comparison, made from arithmetic."""

import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clearhead.records.jsonl import append
from clearhead.report import Page, render, to_console

MAPS = {"differential": ("map 1", "map 2", "difference")}


def own(page: str) -> str:
    """A page's markup without its scripts and data."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def payload(page: str) -> dict[str, Any]:
    """A page's data."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1))


def shown(page: Page) -> str:
    """The text of a page, without markup, as a reader sees it."""
    text = re.sub(r"<style>.*?</style>", "", own(render(page)), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def printed(page: Page, width: int = 140) -> str:
    """What a terminal shows of a page."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in to_console(page, width):
        console.print(part)
    return out.getvalue()


def write_records(
    path: Path,
    *,
    presets: Sequence[str] = ("transformer", "differential", "softmax1"),
    seeds: int = 1,
    label: str = "",
    steps: int = 60,
    trained: bool = False,
    layers: int = 3,
    heads: int = 4,
    command: str = "clearhead compare --tokens 300000 --seeds 1",
) -> Path:
    """Write the records of a comparison; `trained` gives them the defects of a longer run."""
    lines: list[dict[str, Any]] = []
    for index, preset in enumerate(presets):
        for seed in range(seeds):
            source = random.Random(f"{preset} {seed} {label}")
            run = {"run": f"{preset}/seed{seed}"}
            header = {"preset": preset, "size": "tiny", "seed": seed, "label": label, **HEADER}
            header["parameters"] = 1_317_248 + 100 * len(preset)
            header["train"] = {"sequence_length": 256, "batch_size": 8, "tokens": steps * 2048}
            lines.append({"kind": "run", **run, **header, "command": command})
            for n in range(1, steps + 1):
                loss = 3.1 - 0.05 * index + 5.2 * math.exp(-n / 14) + source.gauss(0, 0.05)
                lines.append({"kind": "step", **run, "step": n, "tokens": n * 2048, "loss": loss})
            measures = _measures(source, preset, index, trained, layers, heads)
            lines += ({"kind": "measure", **run, **measure} for measure in measures)
    append(path, *lines)
    return path


HEADER = {
    "data": {"sources": {"python-stdlib": 1.0}, "tokens": {"train": 8_412_331}},
    "model": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    "versions": {"clearhead": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    "device": "CPU, 2 cores, bf16 autocast",
    "date": "2026-09-14T10:12:00+00:00",
}


def _measures(
    source: random.Random, preset: str, index: int, trained: bool, layers: int, heads: int
) -> Iterator[dict[str, Any]]:
    base = (14.0 if trained else 41.0) - 0.9 * index + source.gauss(0, 0.12)
    growth = 1.9 if trained and index == 0 else 1.04 + 0.02 * index
    for power in range(4):
        record = {"metric": "perplexity", "length": 256 * 2**power, "split": "validation"}
        if preset == "gpt2" and power:
            yield {**record, "value": None, "reason": "learned positions end at 256 tokens"}
        else:
            yield {**record, "value": base * growth**power}
    sink = 0.62 if trained and preset != "softmax1" else 0.03
    for name in MAPS.get(preset, ("softmax",)):
        count = heads // 2 if preset in MAPS else heads
        for metric, factor in (("first_token_argmax_share", 1.0), ("first_token_mass", 0.7)):
            cells = [
                {"layer": layer, "head": head, "value": min(1.0, sink * source.uniform(0.4, 1.5))}
                for layer in range(layers)
                for head in range(count)
            ]
            pooled = factor * sum(cell["value"] for cell in cells) / len(cells)
            for cell in ({"value": pooled}, *cells):
                yield {"metric": metric, "map": name, **cell}
    if preset == "softmax1":
        yield {"metric": "null_mass", "map": "softmax", "value": 0.21}
    for metric, first, rest in (("kurtosis", 90.0, 4.0), ("largest_activation", 40.0, 6.0)):
        for tokens, top in (("first", first if trained and index == 0 else rest), ("rest", rest)):
            values = [3 + (top - 3) * (layer + 1) / layers for layer in range(layers)]
            values = [value * source.uniform(0.95, 1.05) for value in values]
            yield {"metric": metric, "tokens": tokens, "value": sum(values) / len(values)}
            for layer, value in enumerate(values):
                yield {"metric": metric, "tokens": tokens, "layer": layer, "value": value}
    yield {"metric": "chance_floor", "value": 0.0239}
    speed = (6600 + source.gauss(0, 5)) / (1 + 0.12 * index)
    yield {"metric": "tokens_per_second", "value": speed}
    yield {"metric": "peak_memory_bytes", "value": (1.1 + 0.1 * index) * 2**30}


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """fake(name, **options): write such records into a file of that name."""
    return lambda name="records.jsonl", **options: write_records(tmp_path / name, **options)
