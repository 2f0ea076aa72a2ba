"""A conversion as a value; no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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

    model: Positional[Model]
    """A Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX, DiffLlama, GraniteSWA or dense Flint, or a
    clearhead model: a folder or a hub name."""
    output: Positional[Path]
    """The folder of the converted model, which does not exist yet."""
    to: tuple[Change, ...] = ()
    """Mechanisms of the new model: a preset, axes as KEY=VALUE, or both, such as "gated
    normalizer=sink"; weights that both models have are kept. Without --to a model of transformers
    becomes a clearhead model, and a clearhead model one of transformers."""
    prefix: Text | None = None
    """Tokens to stand before every text, as learned keys and values (normalizer=key-value): a text
    such as \\n, or auto, to search for one on the text of --calibrate."""
    rotate: tuple[Literal["residual", "values", "down"], ...] = ()
    """Rotate activations that hold outliers, for few bits; the function stays the same. residual
    and values (of heads): random rotations inside the weights, at no cost. down: the inputs of the
    MLPs' down projections, by a Hadamard matrix at run time (mlp_rotation=hadamard)."""
    seed: Natural = 0
    """Seed of the random rotations of the residual stream and the values."""
    learn_rotation: bool = False
    """Rotate the residual stream once more, by a rotation learned from the weights alone that
    lowers the largest weights of the matrices that read it: for one scale a matrix."""
    equalise: bool = False
    """Scale the rows of every gated MLP's up projection to the same largest weight, and the columns
    of the down projection by the inverse: the same function, for one scale a matrix. Needs
    --rotate down, now or in an earlier conversion; works before and after training."""
    purpose: Annotated[Literal["serving", "llama.cpp"] | None, tyro.conf.arg(name="for")] = None
    """Write a model for servers. serving: as a family of transformers if one fits, else with a
    modelling file of its own, which servers run with trust_remote_code. llama.cpp: as a family
    that llama.cpp's converter to GGUF reads."""
    calibrate: Source | None = None
    """Text that sets what --to adds: a sink gets the weight that the first token has in this text,
    learned keys and values are those of its first tokens. A file, a folder, or another source of
    --data.data."""
    sink_logit: float | None = None
    """Initial logit of the sinks that --to adds; by default −40, too low to have an effect; 0 is
    softmax-1."""
    text: Source | None = None
    """Text on which the distance of both models is measured, in words or as --calibrate; by default
    windows of --calibrate that did not calibrate, or else python-stdlib."""
    length: Length = 512
    """Tokens in a window."""
    windows: Count = 8
    """Number of windows to calibrate on, and of windows to measure on."""

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
        """The axes that change: those of KEY=VALUE words, and the one of a rotation.

        Raises:
            ClearheadError: for words of another form.
        """
        rotation = ["mlp_rotation=hadamard"] if "down" in self.rotate else []
        return overrides([*(word for word in self.to if "=" in word), *rotation])

    @property
    def basis(self) -> list[Any]:
        """The parts of `rotate` that are turned inside the weights."""
        return [part for part in self.rotate if part != "down"]

    @property
    def is_drawn(self) -> bool:
        """True if the conversion draws random rotations."""
        return bool({"residual", "values"} & {*self.rotate})

    @property
    def changes(self) -> bool:
        """True if the model gets other mechanisms."""
        return bool(self.to or self.prefix is not None or self.rotate or self.equalise)
