"""clearhead plan: parameters, FLOPs and cache bytes of models that do not exist yet."""

from dataclasses import dataclass

from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.metavars import Pair, Preset, Size
from clearhead.terminal import console


@dataclass(frozen=True, kw_only=True)
class Command:
    """Models to count."""

    presets: Positional[tuple[Preset, ...]] = ()
    """Presets to count; all of them unless some are named."""
    size: Size = "tiny"
    """Size of the preset: tiny, small, medium, large, or a paper's own."""
    set: tuple[Pair, ...] = ()
    """Changes to the configuration, such as num_hidden_layers=24."""


def run(words: list[str]) -> int:
    from rich.table import Table

    command = parse(
        Command,
        words,
        verb="plan",
        description="Count parameters, FLOPs and cache bytes of presets, without making a weight.",
        examples=("", "transformer sas-p --size small --set num_hidden_layers=24"),
        presets=True,
    )
    from clearhead.models import BASELINE, plan, preset, presets

    names = command.presets or tuple(presets())
    changes = overrides(command.set)
    baseline = plan(preset(BASELINE, command.size)).parameters
    table = Table(title=f"presets at size {command.size}")
    table.add_column("preset", no_wrap=True)
    for heading in (
        "parameters",
        f"to {BASELINE}",
        "without embeddings",
        "MFLOPs a token, forward",
        "cache bytes a token",
    ):
        table.add_column(heading, justify="right")
    for name in names:
        found = plan(preset(name, command.size, **changes))
        table.add_row(
            name,
            f"{found.parameters:,}",
            f"{100 * (found.parameters / baseline - 1):+.2f} %",
            f"{found.non_embedding_parameters:,}",
            f"{found.forward_flops / 1e6:.2f}",
            f"{found.cache_bytes:,.0f}",
        )
    out = console()
    out.print(table)
    for name in names:
        out.print(f"[bold]{name}[/bold]: {presets()[name]}")
    return 0
