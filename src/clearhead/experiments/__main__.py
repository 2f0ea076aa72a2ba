"""One job in a process of its own: `python -m clearhead.experiments`, the job on standard input."""

import sys
from collections.abc import Mapping
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.experiments.compare import compare, make_run
from clearhead.experiments.configs import CompareConfig, FinetuneJob, OneRun
from clearhead.experiments.evaluating import run_evaluation
from clearhead.experiments.finetune import run_finetune
from clearhead.experiments.jobs import command, from_json
from clearhead.measure import Watcher
from clearhead.progress import Line
from clearhead.terminal import say
from clearhead.train import InterruptedRun


class _Log(Watcher):
    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        say(f"{task}: {', '.join(f'{key} {value}' for key, value in at.items())}")


def main() -> None:
    """Run the job; exits with 0, or what its interruption asks for, or 1 and one line."""
    config = from_json(sys.stdin.read())
    sys.argv = command(config)  # what records say that they were made by
    try:
        if isinstance(config, CompareConfig):
            compare(config, say=say, work=Line())
        elif isinstance(config, OneRun):
            make_run(config, say=say, work=Line())
        elif isinstance(config, FinetuneJob):
            run_finetune(config, say=say, work=Line())
        else:
            run_evaluation(config, watcher=_Log(), say=say)
    except InterruptedRun as stop:
        raise SystemExit(stop.code) from stop
    except ClearheadError as error:
        raise SystemExit(f"clearhead: {error}") from error


main()
