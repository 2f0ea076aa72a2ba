"""A job performed by a process of its own, which `forks` starts."""

import sys
from collections.abc import Mapping
from typing import Any

from clearhead.errors import ClearheadError, Stopped
from clearhead.experiments.compare import compare, make_run
from clearhead.experiments.configs import CompareConfig, FinetuneJob, OneRun
from clearhead.experiments.convert_config import ConvertConfig
from clearhead.experiments.converting import run_conversion
from clearhead.experiments.diagnosing import run_diagnosis
from clearhead.experiments.evaluating import run_evaluation
from clearhead.experiments.finetune import run_finetune
from clearhead.experiments.jobs import command
from clearhead.experiments.memory import record_memory
from clearhead.experiments.quantization import run_quantization
from clearhead.experiments.sweep_configs import DiagnoseConfig, PlanConfig, QuantizeConfig
from clearhead.measure import Watcher
from clearhead.progress import Line
from clearhead.terminal import say


class _Log(Watcher):
    def cell(self, task: str, at: Mapping[str, Any]) -> None:
        say(f"{task}: {', '.join(f'{key} {value}' for key, value in at.items())}")


def perform(config: Any) -> None:
    """Run a job; exits with 0, or what its interruption asks for, or 1 and one line."""
    sys.argv = command(config)  # what records say that they were made by
    try:
        if isinstance(config, CompareConfig):
            compare(config, say=say, work=Line())
        elif isinstance(config, OneRun):
            make_run(config, say=say, work=Line())
        elif isinstance(config, FinetuneJob):
            run_finetune(config, say=say, work=Line())
        elif isinstance(config, ConvertConfig):
            run_conversion(config, say)
        elif isinstance(config, PlanConfig):
            record_memory(config)
        elif isinstance(config, DiagnoseConfig):
            run_diagnosis(config, watcher=_Log(), say=say)
        elif isinstance(config, QuantizeConfig):
            run_quantization(config, watcher=_Log(), say=say)
        else:
            run_evaluation(config, watcher=_Log(), say=say)
    except Stopped as stop:
        raise SystemExit(stop.code) from stop
    except ClearheadError as error:
        raise SystemExit(f"clearhead: {error}") from error
