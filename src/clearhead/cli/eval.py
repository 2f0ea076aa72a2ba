"""Evaluate models by length, depth and rope scaling. Losses are computed in float32. Lists of names
may also be separated by commas.

examples:
  clearhead eval runs/train/final --tasks perplexity passkey --lengths 128 256 512 1024
  clearhead eval MODEL --rope-scaling none ntk yarn --factors 2 4 --records results.jsonl
"""

from typing import Any

from clearhead.lab.sweep_configs import EvaluateConfig as Command  # noqa: F401 (its options)


def run(command: Any) -> int:
    from clearhead.cli.publishing import publish_sweep

    return publish_sweep(command, command.page)
