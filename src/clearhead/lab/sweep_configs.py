"""Jobs on trained models as values: eval, diagnose, quantize, convert and plan; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, Suppress

from clearhead import metavars
from clearhead.errors import ClearheadError
from clearhead.metavars import OpensModels, Overrides, overrides
from clearhead.ranges import Count, Length, Natural, check, check_distinct
from clearhead.settings.data import DataConfig
from clearhead.settings.eval import OPTIONS

DIAGNOSIS_FILE = "diagnosis.jsonl"  # in the output folder of a diagnosis
FRESH = "init:"  # before a model that has fresh weights
OWN = ("own",)
AUTO = "auto"  # the prefix that is searched for


@dataclass(frozen=True, kw_only=True)
class SweepConfig(OpensModels):
    """Subjects of a measurement: models, seeds and text."""

    models: Positional[tuple[metavars.Model, ...]]
    """Checkpoints' folders (RUN/final), or hub names; several stand side by side."""
    seeds: tuple[Natural, ...] = (0,)
    """Seeds of random draws: keys, needles, places and samples, or windows (seed 0 reads the first
    windows of the text). Several give every number an interval."""
    data: DataConfig = field(default_factory=lambda: DataConfig(data=OWN))
    """Text and split; the tokenizer is each model's own. The default text, "own", is that of the
    run that trained the model; for any other model, python-stdlib."""

    def __post_init__(self) -> None:
        check(self)
        check_distinct(self, "seeds", *(["models"] if self.models else []))


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(SweepConfig):
    """Models, tasks and text of an evaluation."""

    tasks: tuple[metavars.TaskName, ...] = ()
    """Tasks: perplexity (the default), passkey, needles, recall, hits, allocation, shots,
    hallucination; masked for a masked model. Any other name is a task of lm-eval."""
    lengths: tuple[Length, ...] = ()
    """Lengths in tokens; by default 1, 2, 4 and 8 times max_position_embeddings."""
    tokens: Length = 65_536
    """Tokens of text read at each length, approximately."""
    rope_scaling: tuple[metavars.Scaling, ...] = ("none",)
    """Scalings of the rotary frequencies: none, linear, ntk, dynamic, yarn."""
    factors: tuple[float, ...] = ()
    """Factors of the scalings."""
    split: Literal["validation", "all"] = "validation"
    """Documents to read: the held-out ones, or all (for a file that no training saw)."""
    batch_tokens: Count = 8192
    """Tokens run together; no result depends on it."""
    label: metavars.Name = ""
    """Label of the records on a page that shows several sets."""
    records: Path | None = None
    """File to which each result is appended; the same command goes on where it stopped."""
    page: Path | None = None
    """File for the page of all models given here."""


EvaluateConfig = make_dataclass(
    "EvaluateConfig",
    [(name, kind, field(default_factory=kind)) for name, kind in OPTIONS.items()],
    bases=(EvaluateSettings,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": EvaluateSettings.__doc__, "__module__": __name__},  # to be pickled
)


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(SweepConfig):
    """A diagnosis: models, and windows of text."""

    models: Positional[tuple[metavars.Model, ...]]
    """One or two language models or encoders: a checkpoint's folder (RUN/final) or a hub name.
    init:NAME is a preset with fresh weights, drawn by the first of --seeds."""
    output: Path = Path("runs/diagnose")
    """Folder for diagnosis.jsonl and diagnosis.html; the same command goes on where it stopped."""
    size: metavars.Size | None = None
    """Size of an init: preset, such as small; by default tiny."""
    set: Overrides = field(default_factory=dict)
    """Changes to the configuration of an init: model, such as num_hidden_layers=24."""
    length: Length | None = None
    """Tokens in a window; by default 512, or the model's own limit if that is less."""
    windows: Count = 64
    """Number of windows of validation text."""
    at: Literal["anywhere", "documents"] = "anywhere"
    """Start of the windows: anywhere reads text in order without gaps; documents reads beginnings
    of documents, with the begin token where the tokenizer has one."""
    batch_tokens: Count = 4096
    """Tokens run together. Memory and speed depend on it, the numbers do not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.models) > 2:
            raise ClearheadError(f"give one model or two side by side; found {len(self.models)}")

    @property
    def records(self) -> Path:
        """The file of the records."""
        return self.output / DIAGNOSIS_FILE


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(SweepConfig):
    """A quantisation: models, schemes and text."""

    scheme: tuple[metavars.SchemeName, ...] = (
        "w8a8-coarse",
        "w8a8-token",
        "w4-channel",
        "w4-group",
    )
    """Schemes such as w8a8-fine, w3-group64, logits6-row, kv4-channel, w8a8-token+kv8; or
    "all", whose bits docs/quantize.md lists."""
    deploy: Literal["int8-dynamic-tensor"] | None = None
    """Instead of simulating, save the models in int8 by torchao (its extra) to --output, and show
    size, speed and perplexity beside bfloat16."""
    save: Path | None = None
    """Save one model under one scheme to this folder, in --format, for servers to load (extra
    compressed-tensors); it is opened again and compared with the simulation."""
    format: Literal["compressed-tensors"] = "compressed-tensors"
    """The format of --save: what vLLM and transformers load."""
    output: Path | None = None
    """Folder of the saved model, or parent of the folders MODEL-FORM of several models. It must
    not exist yet."""
    length: Length = 256
    """Tokens in a window of text."""
    tokens: int = 32_768
    """Validation tokens read under each scheme."""
    records: Path | None = None
    """File to which each scheme is appended; the same command goes on where it stopped."""
    page: Path | None = None
    """File for the page of perplexity against bits."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(OpensModels):
    """A conversion: a model, and the mechanisms or the format to put it on."""

    model: Positional[metavars.Model]
    """A Llama, Mistral, Qwen2, Qwen3, GPT-2, GPT-NeoX, DiffLlama, GraniteSWA or dense Flint, or a
    clearhead model: a folder or a hub name."""
    output: Positional[Path]
    """The folder of the converted model, which does not exist yet."""
    to: tuple[metavars.Change, ...] = ()
    """Mechanisms of the new model: a preset, axes as KEY=VALUE, or both, such as "gated
    normalizer=sink". Without --to a model of transformers becomes a clearhead model, and a
    clearhead model one of transformers."""
    prefix: metavars.Text | None = None
    """Tokens before every text, as learned keys and values (normalizer=key-value): a text
    such as \\n, or auto, to search for one on the text of --calibrate."""
    rotate: tuple[Literal["residual", "values", "down"], ...] = ()
    """Rotate activations that hold outliers, for few bits; the function stays the same. residual
    and values (of heads): random rotations inside the weights. down: the inputs of the MLPs' down
    projections, by a Hadamard matrix at run time (mlp_rotation=hadamard)."""
    seed: Natural = 0
    """Seed of the random rotations of the residual stream and the values."""
    learn_rotation: bool = False
    """Rotate the residual stream once more, as learned from the weights alone to lower the largest
    of the matrices that read it."""
    equalise: bool = False
    """Scale the rows of every gated MLP's up projection to the same largest weight, and the columns
    of the down projection by the inverse. Needs --rotate down, now or in an earlier conversion."""
    purpose: Annotated[Literal["serving", "llama.cpp"] | None, tyro.conf.arg(name="for")] = None
    """Write a model for servers: as a family of transformers if one fits, else with a modelling
    file of its own, run with trust_remote_code; or as a family that llama.cpp's converter reads."""
    calibrate: metavars.Source | None = None
    """Text, a source as of --data.data, that sets what --to adds: a sink gets the weight that the
    first token has in it, learned keys and values are those of its first tokens."""
    sink_logit: float | None = None
    """Initial logit of the sinks that --to adds; by default −40, too low to have an effect; 0 is
    softmax-1."""
    text: metavars.Source | None = None
    """Text on which the distance of both models is measured; by default windows of --calibrate that
    did not calibrate, or else python-stdlib."""
    length: Length = 512
    """Tokens in a window."""
    windows: Count = 8
    """Number of windows to calibrate on, and of windows to measure on."""

    def __post_init__(self) -> None:
        if sum("=" not in word for word in self.to) > 1:
            raise ClearheadError("--to takes one preset, and axes")
        if self.prefix == AUTO and self.calibrate is None:
            raise ClearheadError("--prefix auto is searched for on a text: give --calibrate TEXT")
        if self.learn_rotation and "residual" not in self.rotate:
            raise ClearheadError("--learn-rotation has no effect without --rotate residual")
        if not self.changes and (idle := self.given("calibrate", "sink_logit", "text")):
            raise ClearheadError(f"{idle[0]} has no effect without --to, --prefix or --rotate")
        if self.changes and self.purpose:
            raise ClearheadError("--for is a step of its own: convert without it first")

    @property
    def preset(self) -> str | None:
        """The preset that `to` names."""
        return next((word for word in self.to if "=" not in word), None)

    def settings(self) -> dict[str, Any]:
        """The axes that change: those of KEY=VALUE words, and the one of a rotation."""
        rotation = ["mlp_rotation=hadamard"] if "down" in self.rotate else []
        return overrides([*(word for word in self.to if "=" in word), *rotation])

    @property
    def basis(self) -> list[Any]:
        """The parts of `rotate` that are merged into the weights, by random rotations."""
        return [part for part in self.rotate if part != "down"]

    @property
    def changes(self) -> bool:
        """True if the model gets other mechanisms."""
        return bool(self.to or self.prefix is not None or self.rotate or self.equalise)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(OpensModels):
    """Models to count."""

    models: Positional[tuple[metavars.Model, ...]] = ()
    """Presets, or models that convert reads; by default a table of all presets."""
    size: metavars.Size = "tiny"
    """Size of the presets: tiny, small, medium, large, or a paper's own."""
    set: Overrides = field(default_factory=dict)
    """Changes to the configuration of presets, such as num_hidden_layers=24."""
    lengths: Suppress[tuple[Length, ...]] = ()  # tokens of a text, for `record_memory`
    records: Suppress[Path | None] = None  # its output


def short_names(sources: Sequence[str]) -> list[str]:
    """Short, distinct names: a run's folder rather than its "final"."""
    short = []
    for source in sources:
        path = Path(source.removeprefix(FRESH))
        if path.name in ("", ".."):  # the current folder, or one above: by its own name
            path = path.resolve()
        path = path.parent if path.name == "final" and path.parent.name else path
        short.append(FRESH * source.startswith(FRESH) + path.name)
    return short if len(set(short)) == len(short) else list(sources)
