"""clearhead quantize: the cost of few bits, simulated; and models saved in few bits."""

from typing import TYPE_CHECKING

from clearhead.cli.options import parse
from clearhead.experiments.sweep_configs import QuantizeConfig as Command
from clearhead.terminal import say, show

if TYPE_CHECKING:
    from clearhead.records.runs import Line


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="quantize",
        description="Simulate models in few bits, and measure perplexity and accuracy by scheme. "
        "Or, with --deploy, save models in few bits and measure their size, speed and perplexity.",
        examples=(
            "./SmolLM2-135M --scheme w8a8-coarse w8a8-token w4-channel",
            "MODEL --deploy int8-weight-only --output runs/int8",
            "MODEL REPAIRED --deploy int8-dynamic --output runs/both --page both.html",
        ),
    )
    if command.deploy or command.output is not None:
        return _deploy(command)
    from clearhead import progress
    from clearhead.cli.publishing import print_page
    from clearhead.experiments.quantization import run_quantization
    from clearhead.records.loading import load
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import page_of, write_page
    from clearhead.report.costs import outcome

    def told(done: "list[Line]") -> None:
        if done[0]["kind"] != "run":
            work.say(outcome(done[0]))

    with progress.Line(unit="cell") as work:
        lines = run_quantization(command, say=say, work=work, told=told)
    shown = parse_records(lines)
    status = print_page(page_of(shown))
    if command.page is not None:
        kept = shown if command.records is None else load(command.records)
        write_page(page_of(kept, command.title), command.page)
        show(f"page: {command.page}")
    return status


def _deploy(command: Command) -> int:
    from clearhead.cli.publishing import print_page
    from clearhead.experiments.deployment import records_of, run_deployment
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import page_of, write_page

    deployed = run_deployment(command, say=say)
    page = page_of(parse_records(records_of(deployed)), command.title)
    print_page(page)
    for folder in deployed:
        show(f"saved: {folder}; loaded and run by a new process")
    if command.page is not None:
        write_page(page, command.page)
        show(f"page: {command.page}")
    return 0
