"""clearhead eval: perplexity and retrieval, by length, depth and rope scaling."""

from typing import TYPE_CHECKING, Any

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.experiments.sweep_configs import EvaluateConfig as Command
from clearhead.terminal import console, say, show

if TYPE_CHECKING:
    from clearhead.records.runs import Records


def run(words: list[str]) -> int:
    config: Any = parse(
        Command,
        words,
        verb="eval",
        description="Evaluate models by length, depth and rope scaling. Losses are taken in "
        "float32. Lists of names may also be separated by commas.",
        examples=(
            "runs/train/final --tasks perplexity passkey --lengths 128 256 512 1024",
            "MODEL --rope-scaling none ntk yarn --factors 2 4 --records results.jsonl",
        ),
    )
    from clearhead.experiments.evaluating import run_evaluation
    from clearhead.progress import Line
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import page_of, write_page

    done: list[dict[str, Any]] = []
    try:
        with Line(unit="cell") as work:
            run_evaluation(config, say=say, work=work, told=done.extend)
    except ClearheadError:
        _print(parse_records(done))  # what was measured before
        raise
    records = parse_records(done)
    status = _print(records)
    if config.page is not None:
        write_page(page_of(records), config.page)
        show(f"page: {config.page}")
    return status


def _print(records: "Records") -> int:
    """The tables of one model, with every depth; of several, side by side, what the page has."""
    from clearhead.cli.publishing import print_page, status_of
    from clearhead.report import console as terminal
    from clearhead.report import evaluation, page_of

    if len(records.runs) > 1:
        return print_page(page_of(records))
    out = console()
    for run in records.runs:
        for pivot in evaluation.tables(records, run.id):
            for table in terminal.tables(pivot, threshold=0.0):
                out.print(table)
    if records.runs and (verdict := evaluation.verdict(records)):
        show(verdict)
    return status_of(records)
