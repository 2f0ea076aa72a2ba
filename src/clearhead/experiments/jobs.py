"""A configuration as the job of a process; no torch, so that experiments are listed quickly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The configuration of a verb, or one run of a comparison."""
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

    @property
    def key(self) -> str:
        """LABEL/ARM."""
        return f"{self.label}/{self.arm}"

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
    def chain(self) -> "list[Job]":
        """The jobs that make the model that this job reads, in order, and this job."""
        return [*(self.after.chain if self.after else ()), self]

    @property
    def identity(self) -> str:
        """The hash of the settings of this job and of the jobs before it."""
        before = self.after and self.after.identity
        return digest_of([type(self.config).__name__, self.settings, before])
