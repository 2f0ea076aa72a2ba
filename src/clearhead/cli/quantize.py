"""clearhead quantize: the cost of few bits, simulated; and models saved in few bits."""

from dataclasses import dataclass
from typing import Any

from clearhead.cli.options import parse
from clearhead.experiments.sweep_configs import QuantizeConfig
from clearhead.terminal import console, say, show


@dataclass(frozen=True, kw_only=True)
class Command(QuantizeConfig):
    """Models, schemes and text."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="quantize",
        description="Simulate models in few bits, and measure perplexity and accuracy by scheme. "
        "Or, with --deploy, save a model in few bits and measure its size, speed and perplexity.",
        examples=(
            "./SmolLM2-135M --scheme w8a8-coarse w8a8-token w4-channel",
            "MODEL --deploy int8-weight-only --output runs/int8",
        ),
    )
    if command.deploy is not None or command.output is not None:
        from clearhead.experiments.deployment import run_deployment

        _print(run_deployment(command, say=say), command)
        return 0
    from clearhead.cli.progress import Bar
    from clearhead.cli.publishing import print_page
    from clearhead.experiments.quantization import run_quantization
    from clearhead.records.loading import load
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import page_of, write_page
    from clearhead.report.costs import Outcomes

    with Bar(len(command.models), Outcomes()) as bar:
        lines = run_quantization(command, watcher=bar, say=say)
    shown = parse_records(lines)
    print_page(page_of(shown))
    if command.page is not None:
        kept = shown if command.records is None else load(command.records)
        write_page(page_of(kept, command.title), command.page)
        show(f"page: {command.page}")
    return 0


def _print(found: dict[str, Any], command: Command) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clearhead.experiments.deployment import not_smaller

    form = str(command.deploy)
    title = escape(f"{found['of']}, {form}")
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "bfloat16", form, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, key, digits in (
        ("bytes on disk", "bytes", ",d"),
        ("tokens a second", "tokens_per_second", ",.1f"),
        ("perplexity", "perplexity", ",.4f"),
    ):
        ours, full = found[key], found[f"bfloat16_{key}"]
        table.add_row(name, format(full, digits), format(ours, digits), f"{ours / full:.3f}")
    console().print(table)
    if found["other_linear_layers"]:
        show(f"still in bfloat16, unknown to torchao: {', '.join(found['other_linear_layers'])}")
    if (remark := not_smaller(found)) is not None:
        show(remark)
    show(f"saved: {command.output}; loaded and run by a new process")
