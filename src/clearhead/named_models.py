"""Named models: presets, and sizes, the baseline's shapes, to which they are matched; no torch.

A paper's size is named after it. Counts that the papers state, and where they contradict
themselves, are in docs/recipes.md.
"""

from typing import Any

from clearhead.errors import ClearheadError

BASELINE = "transformer"
"""The preset that all others change."""

_SKIPLESS: dict[str, Any] = {"attention_skip": "none", "shaping": "shaped"}
_SKIPLESS |= {"attention_gain": 1.0, "mlp_gain": "depth"}
_SAS = _SKIPLESS | {"values": "identity", "projections": "identity"}
_SAS |= {"first_values": "reparametrised"}
_SAS_P = _SAS | {"order": "parallel", "mlp_skip": "none"}

_BERT: dict[str, Any] = {"position": "scaled-sinusoidal", "direction": "bidirectional"}
_BERT |= {"norm": "layernorm", "norm_eps": 1e-12, "embedding_norm": "layernorm", "mlp": "geglu"}

PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "differential": {"maps": "differential"},
    "differential-v2": {"maps": "differential-v2"},
    "coca": {"scores": "coca", "position": "rope"},
    "coca-strict": {"scores": "coca-strict", "position": "rope"},
    "coca-slack": {"scores": "coca-slack", "position": "rope"},
    "pope": {"scores": "pope", "position": "rope"},
    "softmax1": {"normalizer": "softmax1"},
    "softpick": {"normalizer": "softpick"},
    "sink": {"normalizer": "sink"},
    "key-bias": {"normalizer": "key"},
    "key-value": {"normalizer": "key-value"},
    "gated": {"epilogue": "gate"},
    "gated-headwise": {"epilogue": "gate-headwise"},
    "xsa": {"epilogue": "xsa"},
    "alibi": {"position": "alibi"},
    "forget": {"position": "forget"},
    "xpos": {"position": "xpos"},
    "osp": {"norm": "rmsnorm-single", "embedding_projection": True},
    "parallel": {"order": "parallel"},
    "skipless": {**_SKIPLESS, "value_init": "orthogonal"},
    "sas": _SAS,
    "sas-p": _SAS_P,
    "sas-p-nonorm": {**_SAS_P, "norm": "none"},
    "clearhead": {**_SAS_P, "epilogue": "gate"},
    "bert": _BERT,
    "bert-sas": {**_BERT, **_SAS},
    "bert-sas-p": {**_BERT, **_SAS_P},
}
"""Presets by name: the intervention of each, as axes that it changes of the baseline."""

SMALLER = ("sas", "sas-p", "sas-p-nonorm", "clearhead", "bert-sas", "bert-sas-p")
"""Presets at the baseline's width, since their claim is as good a model with fewer parameters."""

_OWN = frozenset(PRESETS)
_SUMMARIES: dict[str, str] = {}  # of presets of other packages


def _size(
    layers: int, width: int, heads: int, vocabulary: int, positions: int, **more: Any
) -> dict[str, Any]:
    size = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    return size | {"num_attention_heads": heads, "max_position_embeddings": positions} | more


def _diff(layers: int, width: int, heads: int) -> dict[str, Any]:
    """A size of arXiv 2410.05258's scaling study: `heads` are the Transformer's, twice DIFF's."""
    return _size(layers, width, heads, 100_288, 2048)


def _gpt2(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    """A size of arXiv 2410.17174, by the shapes that are usual for its names."""
    own = {"intermediate_size": 4 * width, "position": "learned", "mlp": "gelu"}
    return _size(layers, width, heads, 50_257, 1024, **more, **own)


_CODEPARROT = _size(
    18, 768, 12, 50_000, 1024, intermediate_size=3072, position="learned", mlp="relu"
)
_DIFF_3B = {**_diff(28, 3072, 24), "intermediate_size": 8192, "max_position_embeddings": 4096}
_COCA = {"order": "parallel", "mlp": "gelu", "norm": "layernorm", "bias": True}
_UNTIED = {"tie_word_embeddings": False}

# Layers, width, heads, vocabulary, positions.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _size(4, 192, 6, 4096, 256, intermediate_size=512),
    "small": _size(12, 512, 8, 16_384, 1024, intermediate_size=1376),
    "medium": _size(12, 1024, 16, 32_768, 2048),
    "large": _size(24, 1024, 16, 32_768, 2048),
    "codeparrot": _CODEPARROT,
    "codeparrot-72": {**_CODEPARROT, "num_hidden_layers": 72, "intermediate_size": 1536},
    "languini": _size(12, 768, 12, 16_384, 512, intermediate_size=3072, mlp="gelu"),
    "crammed": _size(16, 768, 12, 32_768, 128, intermediate_size=1536),
    "diff-830m": _diff(24, 1536, 16),
    "diff-1.4b": _diff(24, 2048, 16),
    "diff-2.8b": _diff(32, 2560, 20),
    "diff-6.8b": _diff(32, 4096, 32),
    "diff-13.1b": _diff(40, 5120, 40),
    "diff-3b": _DIFF_3B,
    "diff-3b-64k": {
        **_DIFF_3B,
        "max_position_embeddings": 65_536,
        "rope_parameters": {"rope_theta": 640_000.0},
    },
    "coca-350m": _size(24, 1024, 16, 100_864, 512, intermediate_size=4096, **_COCA, **_UNTIED),
    "gpt2-60m": _gpt2(12, 512, 8),
    "gpt2-130m": _gpt2(12, 768, 12),
    "gpt2-350m": _gpt2(24, 1024, 16),
    "gpt2-1.4b": _gpt2(24, 2048, 16, **_UNTIED),
    "llama-130m": _size(12, 768, 12, 32_000, 256, intermediate_size=2048, **_UNTIED),
}
"""Shapes of models by name.

`tiny` trains in a minute on two CPU cores, `small` in minutes on one GPU; `medium` and `large`
have 8 differential heads of 64, the fewest that their authors advise.
"""

# The paper's Pre-LN has RMSNorm, ReLU and no biases; its GPT-2 one gain a norm and no biases.
_PRE_LN = {"norm": "rmsnorm", "mlp": "relu", "bias": False}
_ONE_GAIN = {"norm": "rmsnorm-single", "bias": False}

AT_SIZE: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt2", "tiny"): {"intermediate_size": 736},
    ("gpt2", "codeparrot"): _PRE_LN,
    ("gpt2", "codeparrot-72"): _PRE_LN,
    **{("gpt2", f"gpt2-{size}"): _ONE_GAIN for size in ("60m", "130m", "350m", "1.4b")},
    # As the paper's BERT had it, lower than the depth rule (arXiv 2311.01906, D.2).
    ("bert-sas", "crammed"): {"mlp_gain": 0.05},
    ("bert-sas-p", "crammed"): {"mlp_gain": 0.05},
}
"""Changes of a preset at one size only."""


def register_preset(name: str, changes: dict[str, Any], summary: str) -> None:
    """Add a preset of another package; registering the name again replaces it.

    Args:
        name: any but those of clearhead's own presets, for which a ClearheadError is raised.
        changes: settings that differ from the baseline's, by name.
        summary: one line for tables and help.
    """
    if name in _OWN:
        raise ClearheadError(f"the preset {name!r} is clearhead's: choose another name")
    PRESETS[name], _SUMMARIES[name] = dict(changes), summary


def presets() -> dict[str, str]:
    """{name: one line} of every preset: its changes to the baseline, or its own summary."""
    changed = {
        name: " ".join(f"{k}={v}" for k, v in keys.items()) for name, keys in PRESETS.items()
    }
    return changed | {BASELINE: "pre-norm, RoPE, RMSNorm, SwiGLU"} | _SUMMARIES
