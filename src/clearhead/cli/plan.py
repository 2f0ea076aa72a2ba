"""Estimate the costs of models before a weight exists: parameters, memory by part, FLOPs, the time
of their training, and the cache of keys and values.

examples:
  clearhead plan
  clearhead plan differential --size diff-1.4b --train.tokens 30000000000 --gpus 1 8
  clearhead plan transformer --size diff-3b --gpus 64 --train.checkpointing blocks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import join
from typing import Any, Literal

from clearhead.errors import ClearheadError, choose
from clearhead.lab.sweep_configs import PlanConfig
from clearhead.ranges import Count, Length
from clearhead.terminal import console, show, write
from clearhead.train.config import TrainConfig

Kind = Literal["cpu", "rtx4090", "l40s", "a100", "h100", "h200", "b200", "mi300x"]


@dataclass(frozen=True, kw_only=True)
class Command(PlanConfig):
    """Models to count."""

    recipes: bool = False
    """Print the published runs, each with the command that trains it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Settings of the training."""
    gpu: tuple[Kind, ...] = ("cpu", "a100", "h100", "h200")
    """Devices to train on: GPUs, or this machine's cpu."""
    gpus: tuple[Count, ...] = (1,)
    """Numbers of GPUs, with weights and optimizer sharded over them."""
    context: Length | None = None
    """Tokens of the text whose keys and values are counted; by default the model's own length."""


def run(command: Command) -> int:
    if command.recipes:
        write("\n".join(_recipes()))
        return 0
    if not command.models:
        _overview(command)
        return 0
    for name, config in _models(command):
        show(name)
        _print_bill(config, command)
    return 0


def _overview(command: Command) -> None:
    """Every preset at one size."""
    from clearhead.models import BASELINE, plan, preset, presets

    rows, refused = [], list[str]()
    baseline = plan(preset(BASELINE, command.size, **command.set)).parameters
    for name in presets():
        try:
            counts = plan(preset(name, command.size, **command.set))
        except ClearheadError as error:
            refused.append(str(error))
            continue
        more = f"{100 * (counts.parameters / baseline - 1):+.2f} %"
        flops, cache = f"{counts.forward_flops / 1e6:,.1f}", f"{counts.cache_bytes:,.0f}"
        rows.append((name, f"{counts.parameters:,}", more, flops, cache))
    show(f"presets at size {command.size}{', changed' * bool(command.set)}")
    heads = ("preset", "parameters", "to baseline", "MFLOPs a\ntoken", "cache bytes\na token")
    _print_table(heads, rows)
    for name, summary in presets().items():
        console().print(f"[bold]{name}[/bold]: {summary}")
    for reason in refused:
        console().print(reason, style="dim")


def _models(command: Command) -> Iterator[tuple[str, Any]]:
    """Name and configuration of each model."""
    from clearhead.models import PRESETS, preset
    from clearhead.models.loading import kind_of, load_config, resolved

    changes = command.set
    for name in command.models:
        if name in PRESETS or not (Path(name).exists() or "/" in name):
            base = preset(choose("preset or folder", name, PRESETS), command.size, **changes)
            # As the training fits it: with room for its windows.
            room = max(base.max_position_embeddings, command.train.sequence_length)
            keys = ", ".join(f"{key}={value}" for key, value in changes.items())
            wide = {"max_position_embeddings": room} | changes
            yield f"{name}, {keys or f'size {command.size}'}", preset(name, command.size, **wide)
            continue
        if changes or command.size != Command.size:
            raise ClearheadError(f"{name} is no preset: leave --size and --set out")
        path, trust = resolved(name), command.trust_remote_code
        kind_of(path, trust_remote_code=trust)
        yield name, load_config(path, trust_remote_code=trust)


def _print_bill(config: Any, command: Command) -> None:
    from clearhead.lab.bill import EFFICIENCY, bill
    from clearhead.models import plan

    train = command.train
    counts, memory, flops, estimates = bill(
        config, train, devices=command.gpu, numbers=command.gpus
    )
    read = plan(config, length=command.context)
    show(
        f"  {counts.parameters:,} parameters, {counts.non_embedding_parameters:,} without "
        f"embeddings\n  {train.tokens:,} tokens in {train.steps:,} steps of {train.accumulation} x "
        f"{train.batch_size} x {train.sequence_length}\n"
        f"  {counts.forward_flops / 1e6:,.1f} MFLOPs a token forward; {flops:.3g} FLOPs in "
        f"all, backward twice the forward\n"
        f"  keys and values of {read.length:,} tokens: {_bytes(read.cache_bytes * read.length)}\n"
    )
    how = f"{train.optimizer}, {'fp32' if train.precision == 'fp32' else 'bf16'}"
    how += ", checkpointing" * (train.checkpointing == "blocks")
    how += ", before gradients" * (not any(one["gradients"] for one in memory.values()))
    show(f"  memory of a device at the peak ({how})")
    sizes = [
        (part, *map(_bytes, held))
        for part in next(iter(memory.values()))
        if any(held := [one[part] for one in memory.values()])
    ]
    _print_table(("devices", *map(str, memory)), sizes)
    show(f"\n  time at {100 * EFFICIENCY:g} % of the dense bf16 rate")
    times = []
    for device, number, step, total, fits in estimates:
        speed = f"{train.tokens_per_step / step:,.0f}"
        fit = "yes" if fits else "no"
        times.append((f"{number} x {device}", _time(step), speed, _time(total), fit))
    _print_table(("devices", "a step", "tokens/s", "run", "fits"), times)
    show("")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose numbers are aligned on the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _bytes(number: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= 0.97 * size:  # else of four digits in the smaller unit
            return f"{number / size:,.2f} {unit}"
    return f"{number / 2**10:,.2f} KiB" if number else "none"


def _time(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1000 * seconds:,.1f} ms"


def _recipes() -> Iterator[str]:
    from clearhead.models import plan, preset
    from clearhead.papers.recipes import RUNS

    for name, published in RUNS.items():
        config = published.config
        arm = config.arms[0]
        count = plan(preset(arm.preset, config.size, **arm.model)).parameters
        yield (
            f"# {name}: {published.parameters} of {published.paper}; {count:,} parameters, "
            f"{config.train.tokens:,} tokens"
            + (f"; goes on from {published.continues}" if published.continues else "")
        )
        for arm in config.arms:
            words = ["clearhead", "train", arm.preset, "--size", config.size]
            words += ["--set", *(f"{key}={value}" for key, value in arm.model.items())] * bool(
                arm.model
            )
            rate = published.rates.get(arm.preset, arm.train.learning_rate)
            train = replace(arm.train, learning_rate=rate)
            yield join([*words, *_options("train", train), *_options("data", config.data)])


def _options(part: str, settings: Any) -> Iterator[str]:
    """The words that make these settings, but for those that have their defaults."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value != getattr(type(settings)(), one.name):
            yield f"--{part}.{one.name.replace('_', '-')}"
            yield from map(str, value if isinstance(value, tuple) else (value,))
