"""A conversion as a value; no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import Positional

from clearhead.arguments import OpensModels, overrides
from clearhead.errors import ClearheadError
from clearhead.metavars import Change, Model, Source, Text
from clearhead.ranges import Count, Length, Natural

AUTO = "auto"  # the prefix that is searched for


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(OpensModels):
    """A conversion: a model, and the mechanisms or the format to put it on."""

    verb: ClassVar[str] = "convert"
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
    rotate: tuple[Literal["residual", "values", "down"], ...] = ()
    """Turn what holds outliers, and the weights around it back: the same function, for few bits.
    The residual stream and the heads' values turn for nothing, by random rotations in the weights;
    what the MLPs' down projections read turns at run time, by a Hadamard matrix
    (mlp_rotation=hadamard)."""
    seed: Natural = 0
    """Seed of the random rotations of the residual stream and the values."""
    learn_rotation: bool = False
    """Turn the residual stream once more, by a rotation learned from the weights alone, which makes
    the largest of the layers' weights that read it smaller: the same function, for one scale a
    matrix."""
    equalise: bool = False
    """Give every row of a gated MLP's up projection one size, and the down projection the inverse:
    the same function, for one scale a matrix; for MLPs that --rotate down turns, now or before.
    After training is as good a time as before."""
    purpose: Annotated[Literal["serving", "llama.cpp"] | None, tyro.conf.arg(name="for")] = None
    """Write a model for servers: of a family of transformers where one fits, or else with a
    modelling file of its own, which they run with trust_remote_code. llama.cpp: of a family, as
    its converter to GGUF reads it."""
    calibrate: Source | None = None
    """Give the sinks that --to adds the logits at which they take what the first token takes in
    this text, or learned keys and values those of its first tokens: a file, a folder, or another
    source of --data.data."""
    sink_logit: float | None = None
    """First logit of the sinks that --to adds; −40 where not given, which no row notices; 0 is
    softmax-1."""
    text: Source | None = None
    """Text on which the distance of both models is measured, in words or as --calibrate; where not
    given, windows of --calibrate that did not calibrate, or else python-stdlib, as in diagnose."""
    length: Length = 512
    """Tokens in a window."""
    windows: Count = 8
    """Number of windows that calibrate, and of windows that measure."""

    def __post_init__(self) -> None:
        if len(self._presets) > 1:
            raise ClearheadError(
                f"--to has the presets {' and '.join(self._presets)}: give one, and axes"
            )
        if self.prefix == AUTO and self.calibrate is None:
            raise ClearheadError("--prefix auto is searched for on a text: give --calibrate TEXT")
        if self.learn_rotation and "residual" not in self.rotate:
            raise ClearheadError("--learn-rotation would have no effect without --rotate residual")
        if self.changes and self.purpose:
            raise ClearheadError(
                "--for is a step of its own: convert without it first, then the result with "
                f"--for {self.purpose}"
            )

    @property
    def _presets(self) -> list[str]:
        return [word for word in self.to if "=" not in word]

    @property
    def preset(self) -> str | None:
        """The preset that `to` names."""
        return next(iter(self._presets), None)

    def settings(self) -> dict[str, Any]:
        """The axes that are changed of it, as KEY=VALUE words or by a rotation name them.

        Raises:
            ClearheadError: for words of another form.
        """
        rotation = ["mlp_rotation=hadamard"] if "down" in self.rotate else []
        return overrides([*(word for word in self.to if "=" in word), *rotation])

    @property
    def is_drawn(self) -> bool:
        """True if random rotations are part of it."""
        return bool({"residual", "values"} & {*self.rotate})

    @property
    def changes(self) -> bool:
        """True if the model gets other mechanisms."""
        return bool(self.to or self.prefix is not None or self.rotate or self.equalise)
