"""A job performed by a process of its own, which `processes` starts."""

import sys
from collections.abc import Callable
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
from clearhead.experiments.sweep_configs import (
    DiagnoseConfig,
    EvaluateConfig,
    PlanConfig,
    QuantizeConfig,
)
from clearhead.progress import Line
from clearhead.terminal import say

_RUN: dict[type, Callable[[Any], Any]] = {
    CompareConfig: lambda config: compare(config, say=say, work=Line()),
    OneRun: lambda config: make_run(config, say=say, work=Line()),
    FinetuneJob: lambda config: run_finetune(config, say=say, work=Line()),
    ConvertConfig: lambda config: run_conversion(config, say),
    PlanConfig: record_memory,
    DiagnoseConfig: lambda config: run_diagnosis(config, say=say, work=Line(unit="cell")),
    QuantizeConfig: lambda config: run_quantization(config, say=say, work=Line(unit="cell")),
    EvaluateConfig: lambda config: run_evaluation(config, say=say, work=Line(unit="cell")),
}


def perform(config: Any) -> None:
    """Run a job; exits with 0, or what its interruption asks for, or 1 and one line."""
    sys.argv = command(config)  # what records say that they were made by
    try:
        _RUN[type(config)](config)
    except Stopped as stop:
        raise SystemExit(stop.code) from stop
    except ClearheadError as error:
        raise SystemExit(f"clearhead: {error}") from error
