"""A configuration as a job of a process, and as a command for people."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tyro.conf import Positional

from clearhead.experiments.configs import CompareConfig, OneRun, continued_recipe
from clearhead.records.identity import canonical, digest_of

_POSITIONAL = get_args(Positional[int])[1]
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


def command(config: Any) -> list[str]:
    """The command line of a configuration, or of the comparison that a run is of, for people."""
    if isinstance(config, OneRun):
        config = config.comparison
    usual = None
    if isinstance(config, CompareConfig) and config.base is not None:
        usual = type(config)(train=continued_recipe())  # as the verb has it
    return ["clearhead", config.verb, *words_of(config, usual)]


def words_of(settings: Any, usual: Any = None, place: str = "") -> list[str]:
    """The words of a command line that makes `settings`, the positional ones first.

    Args:
        usual: settings of the same class, which need no word; the defaults of its fields where
            they are not given.
        place: before the names of a nested setting.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    positional, options = list[str](), list[str]()
    for field in fields(settings):
        value = getattr(settings, field.name)
        other = _default(field) if usual is None else getattr(usual, field.name)
        if value == other:
            continue
        marks = getattr(hints[field.name], "__metadata__", ())
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name)
        name = f"{place}{name.replace('_', '-')}"
        if is_dataclass(value):
            options += words_of(value, other, f"{name}.")
        elif isinstance(value, bool):
            *nested, last = name.split(".")
            options.append("--" + (name if value else ".".join([*nested, f"no-{last}"])))
        elif _POSITIONAL in marks:
            positional += _texts(value)
        elif field.name == "rates":  # read as KEY VALUE, where other mappings are KEY=VALUE
            options += [f"--{name}", *map(str, chain.from_iterable(value.items()))]
        else:
            options += [f"--{name}", *_texts(value)]
    return positional + options


def _texts(value: Any) -> list[str]:
    """The words of a value: several for those that hold several."""
    if isinstance(value, Mapping):
        return [f"{key}={_paired(one)}" for key, one in value.items()]
    return [str(one) for one in (value if isinstance(value, tuple) else (value,))]


def _paired(value: Any) -> str:
    """The value of KEY=VALUE: text as it is where it is read as text, and else JSON."""
    if isinstance(value, tuple):
        plain = all(isinstance(one, str) and _is_text(one) and "," not in one for one in value)
        return ",".join(value) if plain else json.dumps(list(value))[1:-1]
    return value if isinstance(value, str) and _is_text(value) else json.dumps(value)


def _is_text(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return True
    return False


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
