"""clearhead convert: a model in another library's format, or on other mechanisms."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from clearhead.cli.options import overrides, parse
from clearhead.consent import OpensModels
from clearhead.errors import ClearheadError
from clearhead.metavars import Change, Model, Source, Text
from clearhead.ranges import Count, Length
from clearhead.records import manifest
from clearhead.terminal import show


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A conversion."""

    model: Positional[Model]
    """A Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX, DiffLlama, GraniteSWA or dense Flint, or a
    clearhead model: a folder or a hub name."""
    output: Positional[Path]
    """The folder of the converted model, which does not exist yet."""
    to: tuple[Change, ...] = ()
    """Mechanisms of the new model: a preset, axes as KEY=VALUE, or both, such as "gated
    normalizer=sink". The weights stay. Without it, the model is written in the other format."""
    prefix: Text | None = None
    """Tokens to stand before every text, as learned keys and values (normalizer=key-value): a text
    such as \\n, or auto, to search for one on the text of --calibrate."""
    rotate: Literal["down"] | None = None
    """Turn what the MLPs' down projections read by a Hadamard matrix (mlp_rotation=hadamard), and
    their weights back: the same function, for few bits."""
    purpose: Annotated[Literal["serving"] | None, tyro.conf.arg(name="for")] = None
    """Write a model for servers: of a family of transformers where one fits, or else with a
    modelling file of its own, which they run with trust_remote_code."""
    calibrate: Source | None = None
    """Give learned sinks the logits at which they take what the first token takes in this text, or
    learned keys and values those of its first tokens: a file, a folder, or another source of
    --data.data."""
    sink_logit: float | None = None
    """First logit of learned sinks; −40 where not given, which no row notices; 0 is softmax-1."""
    text: Source | None = None
    """Text on which the distance of both models is measured; where not given, windows of
    --calibrate that did not calibrate, or else random tokens."""
    length: Length = 512
    """Tokens in a window."""
    windows: Count = 8
    """Number of windows that calibrate, and of windows that measure."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="convert",
        description="Write a model in the other format, once both have given the same logits; or "
        "with --to on other mechanisms, saying how far it is from the first. A checkpoint that "
        "several processes wrote becomes an ordinary folder of the same model.",
        examples=(
            "./SmolLM2-135M ./smollm2-clearhead",
            "./SmolLM2-135M ./smollm2-sink --to sink --calibrate ./books",
            "./SmolLM2-135M ./smollm2-few-bits --prefix auto --rotate down --calibrate ./books",
            "runs/train/final ./served --for serving",
        ),
        presets=True,
    )
    from clearhead.experiments.checkpoints import load_model
    from clearhead.experiments.converting import RECORD, to_other_mechanisms, to_the_other_format
    from clearhead.models.conversion import require_convertible
    from clearhead.models.loading import load_tokenizer
    from clearhead.records.files import publish_folder, require_new, write_json
    from clearhead.train.checkpoint import save_pretrained, whole

    presets = [word for word in command.to if "=" not in word]
    if len(presets) > 1:
        raise ClearheadError(f"--to has the presets {' and '.join(presets)}: give one, and axes")
    idle = [f"--{key.replace('_', '-')}" for key in _MEASURES if _given(command, key)]
    changed = bool(command.to or command.prefix is not None or command.rotate)
    if idle and not changed:
        raise ClearheadError(
            f"{', '.join(idle)} would have no effect without --to, --prefix or --rotate"
        )
    if changed and command.purpose:
        raise ClearheadError("--to and --for are two steps: convert --to first, then that --for it")
    if command.calibrate is not None and command.sink_logit is not None:
        raise ClearheadError("--calibrate and --sink-logit both set the sinks: give one")
    rotation = ["mlp_rotation=hadamard"] if command.rotate else []
    settings = overrides([*(word for word in command.to if "=" in word), *rotation])
    require_new(command.output)
    if (joined := whole(Path(command.model))) is not None:
        if command.to or command.purpose:
            raise ClearheadError("--to and --for take a whole model: convert without them first")
        folder = Path(command.model)
        tokenizer = load_tokenizer(folder) if (folder / "tokenizer_config.json").exists() else None
        with publish_folder(command.output) as temporary:
            save_pretrained(joined, tokenizer, temporary)
            manifest.seal(temporary)
        show(
            f"{type(joined).__name__}, joined from the parts of several processes: {command.output}"
        )
        return 0
    require_convertible(command.model, trust_remote_code=command.trust_remote_code)
    model, tokenizer = load_model(command.model, trust_remote_code=command.trust_remote_code)
    if not changed:
        found = to_the_other_format(model, command.model, serving=command.purpose is not None)
    else:
        found = to_other_mechanisms(
            model,
            tokenizer,
            command.model,
            preset=presets[0] if presets else None,
            settings=settings,
            prefix=command.prefix,
            sink_logit=command.sink_logit,
            calibration=command.calibrate,
            text=command.text,
            length=command.length,
            count=command.windows,
        )
    with publish_folder(command.output) as folder:
        save_pretrained(found.model, tokenizer, folder)
        write_json(folder / RECORD, found.record)
        manifest.seal(folder)
    for line in found.lines:
        show(line)
    same = found.record.get("same_function", True)
    show(
        f"{type(model).__name__} → {type(found.model).__name__}, "
        f"{'with equal logits' if same else 'another function'}: {command.output}"
    )
    return 0


_MEASURES = ("calibrate", "sink_logit", "text", "length", "windows")


def _given(command: Command, key: str) -> bool:
    return getattr(command, key) != getattr(Command, key)
