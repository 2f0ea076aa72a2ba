"""A configuration as a job of a process, and as a command for people."""

import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from clearhead.experiments.commands import words_of
from clearhead.experiments.configs import CompareConfig, FinetuneJob, OneRun, continued_recipe
from clearhead.experiments.convert_config import ConvertConfig
from clearhead.experiments.sweep_configs import (
    DiagnoseConfig,
    EvaluateConfig,
    PlanConfig,
    QuantizeConfig,
)

# Verb → the configuration that holds its options.
VERBS: dict[str, type] = {
    "compare": CompareConfig,
    "convert": ConvertConfig,
    "diagnose": DiagnoseConfig,
    "eval": EvaluateConfig,
    "finetune": FinetuneJob,
    "plan": PlanConfig,
    "quantize": QuantizeConfig,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A configuration to run, and the records that it writes."""

    name: str
    """Name of the job and of its log: sweeps/6-layers/sas-8e-3."""
    config: Any
    """A configuration of one of the `VERBS`, or one run of a comparison, which no verb makes."""
    records: Path
    """The records that it writes; of a conversion the record in its folder."""
    arm: str
    """The arm of these records, and below their label."""
    label: str
    seed: int = 0
    model: Path | None = None
    """Folder of the model that it leaves, if it leaves one."""
    after: "Job | None" = None
    """The job that leaves the model that it reads, if there is one."""
    swept: tuple[float, ...] = ()
    """Learning rates from which that of a training was chosen, where there were several."""

    def __str__(self) -> str:
        return shlex.join(command(self.config))


def command(config: Any) -> list[str]:
    """The command line equivalent to `config`: its fields that differ from their defaults.

    Of a run of a comparison it is that of the whole.
    """
    if isinstance(config, OneRun):
        config = config.comparison
    verb = next(verb for verb, kind in VERBS.items() if isinstance(config, kind))
    usual = None
    if isinstance(config, CompareConfig) and config.base is not None:
        usual = type(config)(train=continued_recipe())  # as the verb has it
    return ["clearhead", verb, *chain(*words_of(config, usual).values())]
