"""The configuration of a clearhead model: flat, one name on each axis, nothing unknown accepted."""

import copy
import dataclasses
import difflib
import os
import typing
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from transformers import GenerationConfig, PreTrainedConfig

from clearhead.errors import ClearheadError, choose
from clearhead.nn.bases import NoPosition
from clearhead.nn.registry import REGISTRY
from clearhead.ranges import Count, check_value
from clearhead.spec import AXES, Gain, LayerSettings, LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layer types
STUB = "modeling_clearhead.py"
_HEADS = ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification")

# In the configuration of a model, of any library, that read this token first in every window.
WINDOW_BEGIN = "window_begin_token_id"
# What transformers or our training stores beside a configuration's declared fields.
_BESIDE = {
    WINDOW_BEGIN,
    *["attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path"],
    *["num_labels", "output_attentions", "quantization_config", "torch_dtype"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROTARY = ("rope", "xpos")  # the positions that read rope_parameters
_GATED = ("swiglu", "geglu")  # the MLPs of three matrices
# What a layer has by the same name as its model's configuration.
_OF_LAYERS = (
    *(each.name for each in dataclasses.fields(LayerSettings)),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
)
_OF_OVERRIDES = tuple(axis for axis in AXES if axis != "direction")
# The value of an axis that alone reads a setting.
_READERS = {
    "lambda_init": (("maps",), "differential"),
    "head_norm": (("maps",), "differential"),
    "prefix_length": (("normalizer",), "key-value"),
    "value_gain": (("values", "projections"), "reparametrised"),
}


class ClearheadConfig(PreTrainedConfig, LayerSettings):
    """Axes and sizes of a model; transformers' own common keys beside them.

    The axes (`clearhead.spec.AXES`; `docs/mechanisms.md` lists their values) are `scores`,
    `qk_norm`, `normalizer`, `maps`, `shaping`, `epilogue`, `values`, `projections`, `position`,
    `direction`, `norm`, `mlp`, `mlp_rotation`, `order`, `attention_skip` and `mlp_skip`.

    `num_attention_heads` × `head_dim` is the attention width of the *baseline*, whatever `maps` is:
    differential attention makes half as many heads of twice the value width from it.

    `intermediate_size` None is 8/3 of the width rounded up to a multiple of 32 for a gated MLP, and
    4 × the width otherwise. `rope_parameters` is transformers' dict, with `rope_type` default,
    linear, dynamic, yarn or llama3 (`clearhead.ops.rope`); dynamic counts from
    `max_position_embeddings`, the trained length. `lambda_init` fixes differential attention's
    λ_init; None is the depth-wise one. `head_norm` is its norm of each head: "affine", "plain" (no
    gain) or "none".

    `sliding_window` counts the keys that a token sees, its own included, in layers that
    `layer_types` calls "sliding_attention" (the others: "full_attention"), or in all layers if that
    is None. `layer_overrides` lists for each layer the axes on which it differs. Both may be a
    pattern that is repeated, such as `[{}, {}, {}, {"position": "none"}]`. `prefix_length` is the
    number of learned keys and values before every text (`normalizer` "key-value"); they take as
    many positions.

    `num_value_heads` None is `num_key_value_heads`, or one for each head where a head's value is
    its own input (`shaping` not none, `values` not linear). `first_values` is `values` of the first
    layer; None is as in the others. `value_init` is how W_V and W_P start: "normal", "orthogonal"
    or "identity"; None is normal for linear ones and the identity for reparametrised ones, whose β
    starts at `value_gain`. `query_range` is the standard deviation of W_Q at the start; None is
    `initializer_range`, or 0 where `shaping` starts from equal scores. `attention_gain`, `mlp_gain`
    and `mlp_skip_gain` are initial gains of the branches and of the MLP's skip; None is no gain.
    `mlp_gain="depth"` is 0.1 · √(18 / layers), times the full width of an MLP over this one's.

    `embedding_norm` is a value of `norm`, for the first layer's input, or "none".
    `embedding_projection` puts a square matrix behind the embedding, and one before the head (OSP's
    EmbProj, arXiv 2506.19697). `dropout` applies in training to the first layer's input, to
    branches that are added to something, and before a classification head's last matrix; never to
    attention maps.

    `annealed_start` lets a null key (`normalizer` softmax1, sink or key) and XSA begin without
    effect and come in over the training run. `requires` names the packages whose mechanisms the
    model has (`clearhead.register`), None for none; it is set automatically, and they must be
    imported to open the model.

    Raises:
        ClearheadError: an unknown key or value (naming the near misses), or a combination that
            cannot be built or would have no effect, saying what to change.
    """

    model_type = "clearhead"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: Count = 4096
    hidden_size: Count = 192
    intermediate_size: Count | None = None
    num_hidden_layers: Count = 4
    num_attention_heads: Count = 6
    num_key_value_heads: Count | None = None
    num_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    layer_overrides: list[dict[str, Any]] | None = None
    requires: list[str] | None = None
    mlp_gain: Gain | Literal["depth"] | None = None
    first_values: str | None = None
    embedding_norm: str = "none"
    embedding_projection: bool = False
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in self._unknown(kwargs):
            self.refuse(key)
        self.settle()
        super().__post_init__(**kwargs)
        if not self._rotates():
            self.rope_parameters = None  # transformers fills in a default of its own
        self.auto_map = {"AutoConfig": "modeling_clearhead.ClearheadConfig"}
        self.auto_map |= {f"AutoModel{x}": f"modeling_clearhead.Clearhead{x}" for x in _HEADS}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers', but settings among the keyword arguments are checked too."""
        own = {key: kwargs.pop(key) for key in cls.settings().keys() & kwargs.keys()}
        return super().from_dict(renamed(config_dict) | own, **kwargs)

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """The keys that clearhead itself declares, and their types."""
        hints = LayerSettings.__annotations__ | ClearheadConfig.__annotations__
        return {key: hint for key, hint in hints.items() if typing.get_origin(hint) is not ClassVar}

    def settle(self) -> None:
        """Derive settings that are None, and check all."""
        for key, hint in self.settings().items():
            if (value := getattr(self, key)) is not getattr(ClearheadConfig, key):  # its default
                plain = isinstance(value, int | float | str)
                (_check_plain if plain else check_value)(key, value, hint)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ClearheadError(
                    f"num_attention_heads={self.num_attention_heads} does not divide "
                    f"hidden_size={self.hidden_size}: choose a divisor, or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            gated = -(-self.hidden_size * 8 // (3 * 32)) * 32
            self.intermediate_size = gated if self.mlp in _GATED else 4 * self.hidden_size
        for package in self.requires or ():
            if str(package) not in REGISTRY.packages():
                raise ClearheadError(
                    f"this model has mechanisms of the package {package!r}: --import that first"
                )
        _settle_layers(self)
        if self._rotates():
            settled = {**_ROPE, **(self.rope_parameters or {})}
            if settled["rope_type"] in ("yarn", "llama3"):  # as transformers does
                settled.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            self.rope_parameters = settled
        elif self.rope_parameters:
            raise ClearheadError(
                f"rope_parameters have no effect with position={self.position!r}: leave them out"
            )
        self._check()

    def layer(self, index: int) -> LayerSpec:
        """The description of layer `index`, from 0."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _OF_LAYERS}
        if index == 0:
            own |= {"norm": self.outer_norm, "values": self.first_values or self.values}
        if self.layer_overrides is not None:
            own |= self.layer_overrides[index]
        if self.layer_types is not None and self.layer_types[index] != SLIDING:
            own["sliding_window"] = None
        gain = self.mlp_gain
        if gain == "depth":  # the MLP's share falls with depth (arXiv 2311.01906, section 4.1, D)
            full = self.hidden_size * (8 / 3 if self.mlp in _GATED else 4)
            gain = 0.1 * (18 / self.num_hidden_layers) ** 0.5 * full / own["intermediate_size"]
        own_values = own["shaping"] != "none" or own["values"] != "linear"
        shared: Any = self.num_attention_heads if own_values else self.num_key_value_heads
        return LayerSpec(
            index=index,
            depth=self.num_hidden_layers,
            num_value_heads=shared if self.num_value_heads is None else self.num_value_heads,
            rope_parameters=dict(self.rope_parameters or _ROPE),
            mlp_gain=gain,
            **own,
        )

    def layers(self) -> list[LayerSpec]:
        """The descriptions of all layers."""
        return [self.layer(index) for index in range(self.num_hidden_layers)]

    @property
    def outer_norm(self) -> str:
        """The norm of the first layer and after the last: no model goes without these."""
        return "layernorm" if self.norm == "none" else self.norm

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Without effect for clearhead's own classes, which a saved folder's stub imports."""
        if not cls.__module__.startswith("clearhead."):
            super().register_for_auto_class(auto_class)

    def to_dict(self) -> dict[str, Any]:
        """The keys that make an equal configuration, without attributes that other code set."""
        own = copy.copy(self)
        for key in self._unknown(vars(self)):
            delattr(own, key)
        return super(ClearheadConfig, own).to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Check the settings again; write config.json, and the stub that imports clearhead."""
        self.settle()
        if unknown := self._unknown(vars(self)):
            warnings.warn(
                f"not saved, as no part of a clearhead model reads it: config.{', '.join(unknown)}",
                stacklevel=2,
            )
        super().save_pretrained(save_directory, **kwargs)
        stub = resources.files("clearhead.models").joinpath("stub.py.txt").read_text("utf-8")
        Path(save_directory, STUB).write_text(stub, "utf-8")

    def refuse(self, key: str) -> NoReturn:
        """Raise a ClearheadError for a key that would have no effect, naming the near misses."""
        if key in self.settings():
            raise ClearheadError(f"{key} is of the configuration: set it there")
        near = difflib.get_close_matches(key, self.settings(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "it would have no effect"
        raise ClearheadError(f"unknown configuration key {key!r}: {hint}")

    def _unknown(self, keys: Iterable[str]) -> list[str]:
        known = _BESIDE | set(GenerationConfig._get_default_generation_params())
        known |= {each.name for each in dataclasses.fields(self)}
        return [key for key in keys if key not in known and not key.startswith("_")]

    def _rotates(self) -> bool:
        own = self.layer_overrides or [{}]
        return bool({one.get("position", self.position) for one in own} & {*_ROTARY})

    def _check(self) -> None:
        alike = self.layer_types is None and self.layer_overrides is None  # but for the first
        number = min(self.num_hidden_layers, 2) if alike else self.num_hidden_layers
        layers = [self.layer(index) for index in range(number)]
        for key, (axes, reader) in _READERS.items():
            chosen = {getattr(layer, axis) for layer in layers for axis in axes}
            if getattr(self, key) != getattr(ClearheadConfig, key) and reader not in chosen:
                given, axis = f"{key}={getattr(self, key)!r}", axes[0]
                raise ClearheadError(
                    f"{given} has no effect with {axis}={getattr(self, axis)!r}: choose {reader!r}"
                )
        if self.annealed_start and not any(map(REGISTRY.anneals, layers)):
            raise ClearheadError("annealed_start has no effect without a null key or XSA")
        if self.embedding_norm != "none":
            choose("embedding_norm", self.embedding_norm, {"none", *REGISTRY.names("norm")})
        kinds = {kind for layer in layers for kind in (layer.values, layer.projections)}
        if self.value_init is not None and kinds == {"identity"}:
            raise ClearheadError("value_init has no effect on values and projections 'identity'")
        for layer in layers:
            REGISTRY.check(layer)
        self.requires = sorted(REGISTRY.packages(layers)) or None


def _settle_layers(config: Any) -> None:
    """Repeat the patterns of a configuration to its number of layers, and check them."""
    for key in ("layer_types", "layer_overrides"):
        pattern = getattr(config, key)
        if pattern is None:
            continue
        times, rest = divmod(config.num_hidden_layers, max(len(pattern), 1))
        if rest or not pattern:
            raise ClearheadError(
                f"{key} has {len(pattern)} entries: give a number that divides the layers'"
            )
        setattr(config, key, list(pattern) * times)
    for kind in config.layer_types or ():
        choose("layer type", str(kind), (FULL, SLIDING))
    for override in config.layer_overrides or ():
        if not isinstance(override, dict):
            raise ClearheadError(f"an entry of layer_overrides is {override!r}: give a mapping")
        for axis, value in override.items():
            choose("axis of layer_overrides", str(axis), _OF_OVERRIDES)
            build: Any = REGISTRY.find(axis, str(value)).build
            if axis == "position" and build.embed is not NoPosition.embed:
                raise ClearheadError(
                    f"layer_overrides has position={value!r}, which is added before any layer"
                )
    window, types = config.sliding_window, config.layer_types
    slides = SLIDING in (types or ())
    if window is None and slides:
        raise ClearheadError(f"layer_types has {SLIDING!r} without a sliding_window: give it")
    if window is not None and types is not None and not slides:
        raise ClearheadError(f"sliding_window={window} has no effect without {SLIDING!r}")
    if window is not None and config.direction != "causal":
        raise ClearheadError("sliding_window is of the last keys: choose direction='causal'")


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings, those of earlier versions under their present names."""
    now = copy.deepcopy(dict(settings))
    for each in (now, *(now.get("layer_overrides") or ())):
        if str(each.get("scores")).startswith("collinear"):
            each["scores"] = each["scores"].replace("collinear", "coca")
        if each.get("residual_scale") == "trainable":
            del each["residual_scale"]
    return now


_check_plain = lru_cache(typed=True)(check_value)  # configurations are made anew for each arm


def window_begin(config: Any) -> dict[str, Any]:
    """{WINDOW_BEGIN: its value}, for conversions to keep; {} without it."""
    value = getattr(config, WINDOW_BEGIN, None)
    return {} if value is None else {WINDOW_BEGIN: value}
