"""A configuration as a job of a process, and as a command for people."""

import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from clearhead.experiments.commands import words_of
from clearhead.experiments.configs import CompareConfig, OneRun, continued_recipe
from clearhead.records.identity import canonical, digest_of

# Fields that no result depends on; and those that name the model which the job before leaves.
_PLACES = {"output", "records", "page", "track", "jobs"}
_MODELS = {"base", "model", "models"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A configuration to run, and the records that it writes."""

    name: str
    """Name of the job and of its log: sweeps/6-layers/sas-8e-3."""
    config: Any
    """The configuration of a verb, or one run of a comparison, which no verb makes."""
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
        """Its command, for people."""
        return shlex.join(command(self.config))

    @property
    def settings(self) -> Any:
        """The configuration as JSON values, without what its result does not depend on: folders
        may move, so that the model of the job before is known by that job's identity."""
        values = canonical(self.config)
        if not isinstance(values, dict):
            return values
        out = _PLACES if self.after is None else _PLACES | _MODELS
        return {name: value for name, value in values.items() if name not in out}

    @property
    def identity(self) -> str:
        """The hash of its settings, and of those of the jobs before it."""
        before = self.after and self.after.identity
        return digest_of([type(self.config).__name__, self.settings, before])


def command(config: Any) -> list[str]:
    """The command line of a configuration, or of the comparison that a run is of."""
    if isinstance(config, OneRun):
        config = config.comparison
    usual = None
    if isinstance(config, CompareConfig) and config.base is not None:
        usual = type(config)(train=continued_recipe())  # as the verb has it
    return ["clearhead", config.verb, *chain(*words_of(config, usual).values())]
