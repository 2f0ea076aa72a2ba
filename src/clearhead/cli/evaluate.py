"""clearhead eval: perplexity and retrieval, by length, depth and rope scaling."""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import EvaluateConfig
from clearhead.terminal import console, say


def run(words: list[str]) -> int:
    config: Any = parse(
        EvaluateConfig,
        words,
        verb="eval",
        description="Evaluate a model by length, depth and rope scaling. Losses are taken in "
        "float32. Lists, but of files and sources, may also be separated by commas.",
        examples=(
            "runs/train/final --tasks perplexity passkey --lengths 128 256 512 1024",
            "MODEL --rope-scaling none ntk yarn --factors 2 4 --records results.jsonl",
        ),
    )
    from clearhead.cli.progress import Bar
    from clearhead.experiments.evaluating import run_evaluation

    bar = Bar()
    try:
        with bar:
            lines = run_evaluation(config, watcher=bar, say=say)
    except ClearheadError:
        _print(bar.lines)  # what was measured before
        raise
    _print(lines)
    return 0


def _print(lines: Sequence[Mapping[str, Any]]) -> None:
    from clearhead.records.loading import parse as parse_records
    from clearhead.report import console as terminal
    from clearhead.report import evaluation

    out = console()
    for name in dict.fromkeys(line["run"] for line in lines):  # one, or none before the first cell
        header = {"kind": "run", "run": name, "preset": name, "seed": 0}
        for pivot in evaluation.tables(parse_records([header, *map(dict, lines)]), name):
            for table in terminal.tables(pivot, threshold=0.0):
                out.print(table)
