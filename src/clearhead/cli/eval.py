"""Evaluate models by length, depth and rope scaling. Losses are computed in float32. Lists of names
may also be separated by commas.

examples:
  clearhead eval runs/train/final --tasks perplexity passkey --lengths 128 256 512 1024
  clearhead eval MODEL --rope-scaling none ntk yarn --factors 2 4 --records results.jsonl
"""

from typing import Any

from clearhead.errors import ClearheadError
from clearhead.lab.sweep_configs import EvaluateConfig as Command  # noqa: F401 (its options)


def run(command: Any) -> int:
    from clearhead.cli.publishing import publish
    from clearhead.lab.measuring import measure
    from clearhead.progress import Line

    done: list[dict[str, Any]] = []
    files = [command.records] if command.records else []
    try:
        with Line(unit="cell") as work:
            measure(command, work=work, lines=done)
    except ClearheadError:
        if done:  # what was measured before
            publish(files, None, lines=done)
        raise
    return publish(files, command.page, lines=done)
