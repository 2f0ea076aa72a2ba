"""The import of a model of transformers, and the export that imports back as the same model."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from clearhead.errors import ClearheadError
from clearhead.models.configuration import SLIDING, ClearheadConfig, window_begin
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.ops.rope import KINDS
from clearhead.spec import AXES
from clearhead.terminal import say

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rope_parameters", "initializer_range", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
# What a layer starts from, and what it leaves out in training: no part of a trained function.
_STARTS = ("initializer_range", "query_range", "value_init", "dropout")
# What transformers leaves out in training, by its names.
_DROPOUTS = ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family of transformers; names of weights and settings are Llama's unless stated."""

    model: Any  # its causal language model class
    axes: Callable[[Any], dict[str, Any]]  # clearhead's settings that have other names
    # {setting: the only value of it that clearhead supports}
    needs: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    settings: Callable[[ClearheadConfig], dict[str, Any]] = lambda ours: {}  # the family's settings
    suits: Callable[[ClearheadConfig], bool] = lambda ours: False  # True: exported to this family
    names: Mapping[str, str] = field(default_factory=dict)  # {part of a name: clearhead's}, in turn
    # Changes of the weights on import and export, under clearhead's names.
    read: Callable[[State, Any], State] = lambda state, theirs: state
    write: Callable[[State, ClearheadConfig], State] = lambda state, ours: state
    # {a layer's setting: values} that the export merges into the weights
    but: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name: str = self.model.__name__
        return name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")

    def imported(self, model: Any, *, share: bool = False) -> ClearheadForCausalLM:
        """The same function as a clearhead model, with weights as by `filled`."""
        for key, value in self.needs.items():
            if (theirs := getattr(model.config, key)) != value:
                raise ClearheadError(
                    f"a {self.name} with {key}={theirs!r} has no place: give {value!r}"
                )
        if dropped := dropouts(model.config):
            say(f"{words_of(dropped)} of this {self.name} is for training alone, and left out")
        config = self.counterpart(model.config)
        state = self.read(_renamed(model.state_dict(), self.names), model.config)
        if config.bias:
            state = with_all_biases(state)
        return filled(ClearheadForCausalLM, config, state, model, share=share)

    def exported(self, model: ClearheadForCausalLM) -> Any:
        """The same function as a model of the family, with copies of the weights in their dtype."""
        model = merged(model)
        ours = model.config
        theirs = self.model.config_class(
            **copied(ours), rms_norm_eps=ours.norm_eps, **self.settings(ours)
        )
        self._check_export(ours, self.counterpart(theirs))
        names = {here: there for there, here in self.names.items()}
        state = _renamed(self.write(model.state_dict(), ours), names)
        return filled(self.model, theirs, state, model)

    def counterpart(self, theirs: Any) -> ClearheadConfig:
        eps = {"norm_eps": getattr(theirs, "rms_norm_eps", None)}
        return ClearheadConfig(**copied(theirs) | eps | self.axes(theirs))

    def _check_export(self, ours: ClearheadConfig, back: ClearheadConfig) -> None:
        """Refuse a model that, exported and imported again as `back`, would be another function."""
        mine = [("embedding_norm", ours.embedding_norm, back.embedding_norm)]
        for layer, other in zip(ours.layers(), map(vars, back.layers()), strict=True):
            mine += [(key, value, other[key]) for key, value in vars(layer).items()]
        # An axis says more than the gains that come with it.
        for key, value, only in sorted(mine, key=lambda entry: entry[0] not in AXES):
            if value != only and key not in _STARTS and value not in self.but.get(key, ()):
                raise ClearheadError(
                    f"{self.name} has no {key}={value!r}: only {key}={only!r} can be exported"
                )


def copied(config: Any) -> dict[str, Any]:
    """The settings that have the same name in clearhead and in transformers."""
    settings = {key: deepcopy(getattr(config, key, None)) for key in _SAME} | window_begin(config)
    return settings | {"rope_parameters": rotation(config) or None}


def rotation(config: Any) -> dict[str, Any]:
    """The rotary parameters that have an effect; published configurations hold others too, such as
    "type" and attn_factor, which transformers ignores."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = str(rope.get("rope_type"))
    if kind not in KINDS:
        return rope
    if kind == "yarn" and rope.get("factor") is None:  # as transformers does
        rope["factor"] = config.max_position_embeddings / rope["original_max_position_embeddings"]
    read = {"rope_type", "rope_theta", *chain(*KINDS[kind])}
    if rope.get("partial_rotary_factor") not in (None, 1):
        read.add("partial_rotary_factor")  # refused: programs differ in whether they read it
    return {key: value for key, value in rope.items() if key in read}


def dropouts(theirs: Any) -> dict[str, float]:
    """Dropout rates above 0 of a transformers configuration: {setting: rate}."""
    shares = {key: getattr(theirs, key, 0.0) for key in _DROPOUTS}
    return {key: share for key, share in shares.items() if share}


def words_of(shares: Mapping[str, float]) -> str:
    """Rates as text, such as "attn_pdrop=0.1, resid_pdrop=0.1"."""
    return ", ".join(f"{key}={share:g}" for key, share in shares.items())


def windows(theirs: Any) -> dict[str, Any]:
    """Sliding windows by layer, in clearhead's settings."""
    window, types = theirs.sliding_window, getattr(theirs, "layer_types", None)
    if window is None or (types is not None and SLIDING not in types):
        return {}
    return {"sliding_window": window, "layer_types": types}


def positions(rotates: Sequence[bool]) -> dict[str, Any]:
    """Rotary position in some of the layers, in clearhead's settings."""
    if not any(rotates):
        return {"position": "none", "rope_parameters": None}
    if all(rotates):
        return {}
    return {"layer_overrides": [{} if each else {"position": "none"} for each in rotates]}


def _renamed(state: State, parts: Mapping[str, str]) -> State:
    for old, new in parts.items():
        state = {name.replace(old, new): weight for name, weight in state.items()}
    return state


def with_all_biases(state: State) -> State:
    """The weights with a bias, 0 where there was none, beside each matrix of a layer."""
    biases = {
        name.removesuffix("weight") + "bias": torch.zeros_like(weight[:, 0])
        for name, weight in state.items()
        if name.removesuffix(".weight").endswith(_LINEAR)
    }
    return biases | state


def filled(kind: Any, config: Any, state: State, source: Any, *, share: bool = False) -> Any:
    """A model of `kind` with these weights, copied unless `share`, in evaluation mode, with the
    device, dtype and generation settings of its source."""
    # On a CPU, for buffers that no checkpoint has; of the weights no memory is touched.
    with no_init_weights(), local_torch_dtype(source.dtype):
        model = kind(deepcopy(config))
    options: Any = {"device": source.device, "dtype": source.dtype, "copy": not share}
    state = {name: weight.to(**options).contiguous() for name, weight in state.items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        what, words = type(source).__name__, " ".join(str(error).split())
        raise ClearheadError(
            f"the weights of this {what} are not those of a {kind.__name__}: {words}"
        ) from None
    model.tie_weights()
    model.generation_config = deepcopy(source.generation_config)
    return model.to(source.device).eval()


def merged(model: ClearheadForCausalLM) -> ClearheadForCausalLM:
    """The same function with `embedding_projection` within the embedding and an untied head, in
    copies; the model itself where it has none."""
    if not model.config.embedding_projection:
        return model
    config, state = deepcopy(model.config), model.state_dict()
    config.embedding_projection = config.tie_word_embeddings = False
    first, last = (state.pop(f"model.project_{side}.weight").double() for side in ("in", "out"))
    for name, matrix in (("model.embed_tokens.weight", first.mT), ("lm_head.weight", last)):
        state[name] = state[name].double() @ matrix
    return filled(ClearheadForCausalLM, config, state, model)
