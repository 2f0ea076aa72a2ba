"""Arms of a comparison: presets, each with every combination of the varied settings."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.train.config import TrainConfig

BETWEEN = " · "
TRAIN = "train."
OPTIMIZER = "train.optimizer"
_OF_PROCESSES = ("parallel", "timeout")  # which an arm's training has one of
_SETTINGS = [TRAIN + one.name for one in fields(TrainConfig) if one.name not in _OF_PROCESSES]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A preset with changes, as one side of a comparison."""

    name: str
    """Name in tables, and key of the records: softmax1 · orthoadam."""
    preset: str
    changes: dict[str, Any]
    """Varied settings, {KEY: value}."""
    model: dict[str, Any]
    """Keys of the configuration: those set for every arm, and those varied."""
    train: TrainConfig

    @property
    def folder(self) -> str:
        """The name as a file's: softmax1+orthoadam; with a digest where it is not the whole name.

        No other name has the same.
        """
        plain = self.name.replace(BETWEEN, "+").replace(" ", "=")
        safe = re.sub(r"[^A-Za-z0-9._+=-]", "-", plain)[:100]
        if safe == plain:
            return safe
        return f"{safe}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def make_arms(
    presets: Sequence[str],
    train: TrainConfig,
    *,
    set: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
) -> tuple[Arm, ...]:
    """Every preset with every combination of the values in `vary`, presets first; no torch.

    Args:
        set: keys of the configuration, the same for every arm.
        vary: {KEY: values}; a KEY is `train.FIELD` of `TrainConfig`, or a key of ClearheadConfig.

    Raises:
        ClearheadError: for an unknown or impossible setting of the training.
    """
    _check_keys(vary)
    arms = []
    for name, values in itertools.product(presets, itertools.product(*vary.values())):
        changes = dict(zip(vary, values, strict=True))
        called = BETWEEN.join([name, *(_in_words(*change) for change in changes.items())])
        model, settings = dict(set), dict[str, Any]()
        for key, value in changes.items():
            (settings if key.startswith(TRAIN) else model)[key.removeprefix(TRAIN)] = value
        try:
            settled = replace(train, **settings)
        except ClearheadError as error:
            raise ClearheadError(f"{called}: {error}" if vary else str(error)) from error
        arms.append(Arm(name=called, preset=name, changes=changes, model=model, train=settled))
    return tuple(arms)


def models_of(arms: Iterable[Arm], size: str, *, based: bool) -> dict[str, Any]:
    """{name of an arm: its model's configuration}; of an arm that starts from a trained model,
    which keeps its sizes, what it changes there.

    Raises:
        ClearheadError: for an unknown key, an impossible value or arm, and two equal arms.
    """
    from transformers import PreTrainedConfig

    from clearhead.models import ClearheadConfig, preset
    from clearhead.models.starts import target

    keys = [key for key in ClearheadConfig.settings() if key not in vars(PreTrainedConfig)]
    models, names = dict[str, Any](), dict[str, str]()
    for arm in arms:
        for key in arm.model:
            if key in arm.changes:
                choose("key to vary", key, [*_SETTINGS, *keys])
            choose("key of the configuration", key, keys)
        try:
            if based:
                model: Any = target(arm.preset, arm.model)
            else:
                model = preset(arm.preset, size, **arm.model)
        except ClearheadError as error:
            raise ClearheadError(f"{arm.name}: {error}" if arm.changes else str(error)) from error
        models[arm.name] = model
        settings = model if based else model.to_dict()
        same = f"{json.dumps(settings, sort_keys=True, default=str)} {arm.train}"
        if (other := names.setdefault(same, arm.name)) != arm.name:
            raise ClearheadError(
                f"{other!r} and {arm.name!r} are the same model in the same training: "
                "leave one of their presets or values out"
            )
    return models


def _check_keys(vary: Mapping[str, Sequence[Any]]) -> None:
    for key, values in vary.items():
        if key.startswith(TRAIN):
            choose("key to vary", key, _SETTINGS)
        if key == "train.seed":
            raise ClearheadError("train.seed cannot be varied: give several seeds")
        words = [_in_words(key, value) for value in values]
        if not words or len(words) != len({*words}):
            found = ", ".join(words) or "none"
            raise ClearheadError(f"{key} varies over one or more values, each once; found {found}")


def _in_words(key: str, value: Any) -> str:
    """A change as part of a name: `orthoadam`, `norm layernorm`, `learning_rate 0.003`."""
    text = value if isinstance(value, str) else json.dumps(value)
    # Optimizers are known by name; most other words, `none` say, need to be told of what.
    return text if key == OPTIMIZER else f"{key.removeprefix(TRAIN)} {text}"
