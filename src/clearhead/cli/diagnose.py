"""clearhead diagnose: attention and hidden states of any model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from clearhead.cli.names import short_names
from clearhead.cli.options import overrides, parse
from clearhead.consent import OpensModels
from clearhead.data.config import DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import DiagnoseConfig
from clearhead.metavars import Model, Pair, Size
from clearhead.terminal import printable, say

if TYPE_CHECKING:
    from clearhead.data import Corpus

RECORDS, PAGE = "diagnosis.jsonl", "diagnosis.html"


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels, DiagnoseConfig):
    """A diagnosis."""

    models: Positional[tuple[Model, ...]]
    """One or two language models or encoders: a checkpoint's folder (RUN/final) or a hub name.
    init:NAME is a preset, or a checkpoint's configuration, with fresh weights."""
    output: Path = Path("runs/diagnose")
    """Folder for diagnosis.jsonl and diagnosis.html."""
    size: Size | None = None
    """Size of an init: preset, such as small; tiny where none is given."""
    set: tuple[Pair, ...] = ()
    """Changes to the configuration of an init: model, such as num_hidden_layers=24."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and split; the tokenizer is each model's own."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="diagnose",
        description="Measure attention sinks, outliers, order, rank and extrapolation of one or "
        "two Hugging Face models on held-out text. Print a table; write records and a page.",
        examples=(
            "./SmolLM2-135M --data.data my/texts",
            "init:sas init:transformer --set num_hidden_layers=24 --output runs/at-the-start",
        ),
        presets=True,
    )
    if len(command.models) > 2:
        raise ClearheadError(f"one model or two side by side; found {len(command.models)}")
    if command.set and not any(name.startswith("init:") for name in command.models):
        raise ClearheadError("--set has no effect on a trained model: diagnose init:NAME")
    _refuse_idle(command)
    from clearhead.cli.publishing import publish
    from clearhead.diagnose.diagnosis import LESS_MEMORY
    from clearhead.experiments.diagnosing import diagnosis_records
    from clearhead.models.inspection import within_memory
    from clearhead.records.files import write_text
    from clearhead.records.loading import as_line

    records: list[dict[str, Any]] = []
    for source, name in zip(command.models, short_names(command.models), strict=True):
        with within_memory(LESS_MEMORY):
            model, corpus = _loaded(source, command)
        say(f"{name}: {command.windows} windows")
        records += diagnosis_records(name, model, corpus, command, _progress(name, command))
        del model
    # Only now, that everything is known: nothing is ever half written.
    write_text(command.output / RECORDS, "".join(map(as_line, records)))
    publish([command.output / RECORDS], command.output / PAGE)
    return 0


def _loaded(source: str, command: Command) -> tuple[Any, "Corpus"]:
    import torch

    from clearhead.experiments.building import own_text, untrained
    from clearhead.experiments.checkpoints import load_model

    if source.startswith("init:"):
        torch.manual_seed(0)
        return untrained(
            source.removeprefix("init:"),
            "tiny" if command.size is None else command.size,
            overrides(command.set),
            command.data,
            trust_remote_code=command.trust_remote_code,
            say=say,
        )
    model, tokenizer = load_model(
        source,
        kinds=("causal", "masked", "bare"),
        trust_remote_code=command.trust_remote_code,
    )
    return model, own_text(command.data, tokenizer, progress=say)


def _refuse_idle(command: Command) -> None:
    """Refuse options of presets where none is diagnosed, and a tokenizer beside a model's own."""
    from clearhead.experiments.building import refuse_tokenizer
    from clearhead.experiments.checkpoints import is_preset

    fresh = [name.removeprefix("init:") for name in command.models if name.startswith("init:")]
    presets = [name for name in fresh if is_preset(name)]
    if not presets:
        refuse_tokenizer(command.data)
        if command.size is not None:
            raise ClearheadError("--size has no effect on a checkpoint: diagnose init:PRESET")
    elif len(presets) < len(command.models) and command.data.tokenizer is not None:
        refuse_tokenizer(command.data)


def _progress(name: str, command: Command) -> Callable[[int], None]:
    done = 0

    def show(windows: int) -> None:
        nonlocal done
        done += windows
        if sys.stderr.isatty():
            print(
                f"\r{printable(name)}: {min(done, command.windows)} of {command.windows} windows",
                end="",
                file=sys.stderr,
                flush=True,
            )
            if done >= command.windows:
                say("")

    return show
