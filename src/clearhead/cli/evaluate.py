"""clearhead eval: perplexity and retrieval, by length, depth and rope scaling."""

from typing import Any

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.lab.sweep_configs import EvaluateConfig as Command


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
    from clearhead.cli.publishing import publish
    from clearhead.lab.measuring import measure
    from clearhead.progress import Line

    done: list[dict[str, Any]] = []
    files = [config.records] if config.records else []
    try:
        with Line(unit="cell") as work:
            measure(config, work=work, told=done.extend)
    except ClearheadError:
        if done:  # what was measured before
            publish(files, None, lines=done)
        raise
    return publish(files, config.page, lines=done)
