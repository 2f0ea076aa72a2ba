"""Named models: a point on the axes at a size, matched in parameters to the baseline."""

from collections.abc import Mapping
from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.models.configuration import ClearheadConfig

BASELINE = "transformer"

_SKIPLESS = {
    "attention_skip": "none",
    "shaping": "shaped",
    "attention_gain": 1.0,
    "mlp_gain": "depth",
}
_SAS = {
    **_SKIPLESS,
    "values": "identity",
    "projections": "identity",
    "first_values": "reparametrised",
}
_SAS_P = {**_SAS, "order": "parallel", "mlp_skip": "none"}

_BERT = {
    "position": "scaled-sinusoidal",
    "direction": "bidirectional",
    "norm": "layernorm",
    "norm_eps": 1e-12,
    "embedding_norm": "layernorm",
    "mlp": "geglu",
}

# What the preset changes of the baseline: its intervention.
PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "differential": {"maps": "differential"},
    "differential-v2": {"maps": "differential-v2"},
    "coca": {"scores": "collinear", "position": "rope"},
    "coca-strict": {"scores": "collinear-strict", "position": "rope"},
    "coca-slack": {"scores": "collinear-slack", "position": "rope"},
    "softmax1": {"normalizer": "softmax1"},
    "sink": {"normalizer": "sink"},
    "key-bias": {"normalizer": "key"},
    "key-value": {"normalizer": "key-value"},
    "gated": {"epilogue": "gate"},
    "xsa": {"epilogue": "xsa"},
    "alibi": {"position": "alibi"},
    "xpos": {"position": "xpos"},
    "parallel": {"order": "parallel"},
    "skipless": {**_SKIPLESS, "value_init": "orthogonal"},
    "sas": _SAS,
    "sas-p": _SAS_P,
    "sas-p-nonorm": {**_SAS_P, "norm": "none"},
    "bert": _BERT,
    "bert-sas": {**_BERT, **_SAS},
    "bert-sas-p": {**_BERT, **_SAS_P},
}

# At the baseline's width, since what they claim is as good a model with fewer parameters.
SMALLER = ("sas", "sas-p", "sas-p-nonorm", "bert-sas", "bert-sas-p")

SUMMARIES = {
    "transformer": "the baseline: pre-norm, RoPE, RMSNorm, SwiGLU",
    "gpt2": "learned positions, LayerNorm, GELU, biases",
    "differential": "the baseline with differential attention (V1)",
    "differential-v2": "the baseline with differential attention (V2), its MLP narrower",
    "coca": "the baseline with collinear attention (CoCA, exact), its MLP wider",
    "coca-strict": "the baseline with CoCA-Strict, its MLP wider",
    "coca-slack": "the baseline with CoCA-Slack (the authors' code), its MLP wider",
    "softmax1": "the baseline with softmax-1",
    "sink": "the baseline with a learned sink for each head",
    "key-bias": "the baseline with a learned key of value zero for each key head",
    "key-value": "the baseline with a learned key and value for each key head, before the text's",
    "gated": "the baseline with a sigmoid gate on the heads' outputs, its MLP narrower",
    "xsa": "the baseline with exclusive self-attention (no part along a token's own value)",
    "alibi": "the baseline with ALiBi instead of RoPE",
    "xpos": "the baseline with xPos instead of RoPE",
    "parallel": "the baseline with attention and MLP side by side",
    "skipless": "no attention skip, shaped attention (V-SkipInit as released)",
    "sas": "no attention skip, no value or projection matrices, shaped attention (SAS)",
    "sas-p": "SAS with attention and MLP side by side and no skip at all (SAS-P)",
    "sas-p-nonorm": "SAS-P without norms but in the first layer and after the last",
    "bert": "the crammed BERT: bidirectional, scaled waves, LayerNorm, GEGLU; for masked tokens",
    "bert-sas": "bert with SAS's blocks",
    "bert-sas-p": "bert with SAS-P's blocks",
}

_CODEPARROT = {
    "vocab_size": 50_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "position": "learned",
    "mlp": "relu",
}

# `tiny` trains in a minute on two CPU cores, `small` in minutes on one GPU; the others are those of
# arXiv 2311.01906.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
    },
    "small": {
        "vocab_size": 16_384,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 1024,
    },
    "codeparrot": _CODEPARROT,
    "codeparrot-72": {**_CODEPARROT, "num_hidden_layers": 72, "intermediate_size": 1536},
    "languini": {
        "vocab_size": 16_384,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "position": "alibi",
        "mlp": "gelu",
    },
    "crammed": {
        "vocab_size": 32_768,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "max_position_embeddings": 128,
    },
}

# The paper's Pre-LN has RMSNorm, ReLU and no biases.
_PRE_LN = {"norm": "rmsnorm", "mlp": "relu", "bias": False}

# What a preset has at one size only: most of all the MLP width at which one with other matrices
# beside the MLP matches the baseline.
_AT_SIZE: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt2", "tiny"): {"intermediate_size": 736},
    ("gpt2", "small"): {"intermediate_size": 2016},
    ("gpt2", "codeparrot"): _PRE_LN,
    ("gpt2", "codeparrot-72"): _PRE_LN,
    ("differential-v2", "tiny"): {"intermediate_size": 448},
    ("differential-v2", "small"): {"intermediate_size": 1200},
    ("gated", "tiny"): {"intermediate_size": 448},
    ("gated", "small"): {"intermediate_size": 1208},
    ("coca", "tiny"): {"intermediate_size": 544},
    ("coca", "small"): {"intermediate_size": 1464},
    ("coca-strict", "tiny"): {"intermediate_size": 576},
    ("coca-strict", "small"): {"intermediate_size": 1544},
    ("coca-slack", "tiny"): {"intermediate_size": 544},
    ("coca-slack", "small"): {"intermediate_size": 1464},
    # As the paper's BERT had it, lower than the depth rule (arXiv 2311.01906, D.2).
    ("bert-sas", "crammed"): {"mlp_gain": 0.05},
    ("bert-sas-p", "crammed"): {"mlp_gain": 0.05},
}
_OWN = frozenset(PRESETS)
# Another value of these has another MLP width.
_SHAPING_KEYS = ("hidden_size", "mlp", "bias")


def register_preset(
    name: str,
    changes: dict[str, Any],
    summary: str,
    at_size: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Add a preset of another package; again by the same name, in place of the first.

    Args:
        changes: what it changes of the baseline.
        summary: one line for tables and help.
        at_size: by size, what it has at that size only, such as an `intermediate_size` that matches
            the baseline's parameters.

    Raises:
        ClearheadError: a name of clearhead's own, an unknown size.
    """
    if name in _OWN:
        raise ClearheadError(f"the preset {name!r} is clearhead's: choose another name")
    for size in at_size or ():
        choose("size", size, SIZES)
    PRESETS[name], SUMMARIES[name] = dict(changes), summary
    _AT_SIZE.update({(name, size): keys for size, keys in (at_size or {}).items()})


def presets() -> dict[str, str]:
    """Every preset's name, with a line on what it is."""
    return dict(SUMMARIES)


def preset(name: str, size: str = "tiny", **overrides: Any) -> ClearheadConfig:
    """The configuration of a preset at a size; `overrides` are any keys of ClearheadConfig.

    Presets match the baseline in parameters at the shapes of the sizes. With another `hidden_size`,
    `mlp` or `bias` the MLP gets the baseline's width, and with other heads it keeps its own: then
    give `intermediate_size`, or see what the preset costs (`clearhead plan`).

    Raises:
        ClearheadError: an unknown preset, size or key (naming the near misses), or a combination
            that cannot be built.
    """
    choose("preset", name, PRESETS)
    choose("size", size, SIZES)
    keys = {**SIZES[size], **PRESETS[name], **_AT_SIZE.get((name, size), {})}
    changed = (key for key in _SHAPING_KEYS if key in overrides)
    if any(overrides[key] != keys.get(key) for key in changed):
        keys.pop("intermediate_size")  # matched to another shape: derive it again
    try:
        return ClearheadConfig(**{**keys, **overrides})
    except ClearheadError as error:
        raise ClearheadError(f"preset {name!r} at size {size!r}: {error}") from error
