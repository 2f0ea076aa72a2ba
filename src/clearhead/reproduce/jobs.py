"""A configuration as a job of a process: as JSON for the process, as a command for people."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from clearhead.experiments.configs import CompareConfig, EvaluateConfig, FinetuneJob

# Verb → the configuration that holds its options, and the field that stands before them.
VERBS: dict[str, tuple[type, str]] = {
    "compare": (CompareConfig, "presets"),
    "eval": (EvaluateConfig, "model"),
    "finetune": (FinetuneJob, "model"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A configuration to run, and the records that it writes."""

    name: str
    """Name of the job and of its log: rates/6-layers/sas-8e-3."""
    config: Any
    """A configuration of one of the `VERBS`."""
    records: Path
    """The records that it writes."""
    arm: str
    """The arm of these records, and below their label."""
    label: str
    model: Path | None = None
    """Folder of the model that it reads, if another job writes it."""

    @property
    def program(self) -> tuple[str, ...]:
        """The process that reads `to_json` from its standard input."""
        return (sys.executable, "-m", "clearhead.reproduce")

    def to_json(self) -> str:
        return json.dumps({_verb(self.config): asdict(self.config)}, default=str)

    def __str__(self) -> str:
        return shlex.join(command(self.config))


def from_json(text: str) -> Any:
    """The configuration of `Job.to_json`."""
    ((verb, config),) = json.loads(text).items()
    return _decoded(VERBS[verb][0], config)


def command(config: Any) -> list[str]:
    """The command line equivalent to `config`: its fields that differ from their defaults."""
    verb = _verb(config)
    positional = VERBS[verb][1]
    words = ["clearhead", verb, *_texts(getattr(config, positional))]
    for one in fields(config):
        if one.name != positional:
            words += _option(f"--{one.name}", getattr(config, one.name), _default(one))
    return words


def _verb(config: Any) -> str:
    return next(verb for verb, (kind, _) in VERBS.items() if isinstance(config, kind))


def _decoded(kind: Any, value: Any) -> Any:
    """A JSON value as one of type `kind`: a dataclass, tuple, dictionary, path or plain value."""
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        settings = {name: _decoded(kinds[name], one) for name, one in value.items()}
        return kind(**settings)  # type: ignore[operator]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        items = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(_decoded(one, item) for one, item in zip(items, value, strict=True))
    if origin is dict:
        return {key: _decoded(inner[1], item) for key, item in value.items()}
    if NoneType in inner and value is not None:
        (other,) = (one for one in inner if one is not NoneType)
        return _decoded(other, value)
    return Path(value) if kind is Path else value


def _option(flag: str, value: Any, default: Any) -> Iterator[str]:
    if value == default:
        return
    if is_dataclass(value):
        for one in fields(value):
            name = one.name
            yield from _option(f"{flag}.{name}", getattr(value, name), getattr(default, name))
        return
    room, dot, name = flag.replace("_", "-").removeprefix("--").rpartition(".")
    yield f"--{room}{dot}{'no-' if value is False else ''}{name}"
    if name == "rates":  # which compare reads as KEY VALUE, the others as KEY=VALUE
        value = tuple(chain.from_iterable(value.items()))
    if not isinstance(value, bool):
        yield from _texts(value)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}={_pair(one)}" for key, one in value.items()]
    return [str(one) for one in (value if isinstance(value, tuple) else (value,))]


def _pair(value: Any) -> str:
    """The value in KEY=VALUE: text as it is, anything else as JSON."""
    if isinstance(value, tuple):
        return ",".join(map(_pair, value))
    return value if isinstance(value, str) else json.dumps(value)


def _default(option: "Field[Any]") -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()
