"""A configuration as a job of a process: as JSON for the process, as a command for people."""

import json
import shlex
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from clearhead.experiments.commands import texts, words_of
from clearhead.experiments.configs import CompareConfig, FinetuneJob, OneRun, continued_recipe
from clearhead.experiments.convert_config import ConvertConfig
from clearhead.experiments.sweep_configs import DiagnoseConfig, EvaluateConfig, QuantizeConfig

# Verb → the configuration that holds its options, and the fields that stand before them.
VERBS: dict[str, tuple[type, tuple[str, ...]]] = {
    "compare": (CompareConfig, ("presets",)),
    "convert": (ConvertConfig, ("model", "output")),
    "diagnose": (DiagnoseConfig, ("models",)),
    "eval": (EvaluateConfig, ("models",)),
    "finetune": (FinetuneJob, ("model",)),
    "quantize": (QuantizeConfig, ("models",)),
}
_RUN = "run"  # one of a comparison, which no verb makes


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A configuration to run, and the records that it writes."""

    name: str
    """Name of the job and of its log: rates/6-layers/sas-8e-3."""
    config: Any
    """A configuration of one of the `VERBS`."""
    records: Path
    """The records that it writes; of a conversion the record in its folder."""
    arm: str
    """The arm of these records, and below their label."""
    label: str
    seed: int = 0
    model: Path | None = None
    """Folder of the model that it reads, if another job writes it."""

    def to_json(self) -> str:
        return json.dumps({_verb(self.config): asdict(self.config)}, default=str)

    def __str__(self) -> str:
        return shlex.join(command(self.config))


def from_json(text: str) -> Any:
    """The configuration of `Job.to_json`."""
    ((verb, config),) = json.loads(text).items()
    return _decoded(OneRun if verb == _RUN else VERBS[verb][0], config)


def command(config: Any) -> list[str]:
    """The command line equivalent to `config`: its fields that differ from their defaults.

    Of a run of a comparison it is that of the whole.
    """
    if isinstance(config, OneRun):
        config = config.comparison
    verb = _verb(config)
    usual = None
    if isinstance(config, CompareConfig) and config.base is not None:
        usual = replace(CompareConfig(), train=continued_recipe())  # as the verb has it
    options = words_of(config, usual)
    before = list[str]()
    for name in VERBS[verb][1]:
        before += texts(getattr(config, name))
        options = {key: words for key, words in options.items() if key.lstrip("-") != name}
    return ["clearhead", verb, *before, *chain(*options.values())]


def _verb(config: Any) -> str:
    verbs = (verb for verb, (kind, _) in VERBS.items() if isinstance(config, kind))
    return next(verbs, _RUN)


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
