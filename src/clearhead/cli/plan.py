"""clearhead plan: what a model costs before it exists."""

from dataclasses import dataclass

from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.terminal import console


@dataclass(frozen=True, kw_only=True)
class Command:
    """Which models to count."""

    presets: Positional[tuple[str, ...]] = ()
    """Presets; all of them unless some are named."""
    size: str = "tiny"
    """tiny, small, or a paper's own: codeparrot, codeparrot-72, languini, crammed."""
    set: tuple[str, ...] = ()
    """Changes to the configuration, KEY=VALUE."""


def run(words: list[str]) -> int:
    from rich.table import Table

    command = parse(
        Command,
        words,
        verb="plan",
        description="Parameters, FLOPs and cache bytes of presets.",
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
