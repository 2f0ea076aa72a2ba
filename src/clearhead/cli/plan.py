"""clearhead plan: what a model costs before it exists."""

from dataclasses import dataclass

from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.models import BASELINE, SIZES, plan, preset, presets
from clearhead.terminal import console


@dataclass(frozen=True, kw_only=True)
class Command:
    """Which models to count."""

    presets: Positional[tuple[str, ...]] = tuple(presets())
    """Presets; all of them unless some are named."""
    size: str = "tiny"
    """One of the sizes above."""
    set: tuple[str, ...] = ()
    """Changes to the configuration, KEY=VALUE."""


def run(words: list[str]) -> int:
    from rich.table import Table

    command = parse(
        Command,
        words,
        verb="plan",
        description=f"Parameters, FLOPs and cache bytes of presets. Sizes: {', '.join(SIZES)}.",
    )
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
    for name in command.presets:
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
    for name in command.presets:
        out.print(f"[bold]{name}[/bold]: {presets()[name]}")
    return 0
