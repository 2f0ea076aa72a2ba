"""Named models: a point on the axes at a size, matched in parameters to the baseline."""

from typing import Any

from clearhead.errors import ClearheadError, choose
from clearhead.models.configuration import ClearheadConfig

BASELINE = "transformer"

# What the preset changes of the baseline: its intervention.
PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "differential": {"maps": "differential"},
    "differential-v2": {"maps": "differential-v2"},
    "coca": {"scores": "collinear"},
    "coca-strict": {"scores": "collinear-strict"},
    "coca-slack": {"scores": "collinear-slack"},
    "softmax1": {"normalizer": "softmax1"},
    "sink": {"normalizer": "sink"},
    "alibi": {"position": "alibi"},
    "xpos": {"position": "xpos"},
    "bert": {
        "position": "scaled-sinusoidal",
        "direction": "bidirectional",
        "norm": "layernorm",
        "norm_eps": 1e-12,
        "embedding_norm": "layernorm",
        "mlp": "geglu",
    },
}

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
    "alibi": "the baseline with ALiBi instead of RoPE",
    "xpos": "the baseline with xPos instead of RoPE",
    "bert": "the crammed BERT: bidirectional, scaled waves, LayerNorm, GEGLU; for masked tokens",
}

# `tiny` trains in a minute on two CPU cores, `small` in minutes on one GPU.
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
    "crammed": {
        "vocab_size": 32_768,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "max_position_embeddings": 128,
    },
}

# The MLP width at which a preset with other matrices beside the MLP matches the baseline.
_MATCHED_WIDTH = {
    ("gpt2", "tiny"): 736,
    ("gpt2", "small"): 2016,
    ("differential-v2", "tiny"): 448,
    ("differential-v2", "small"): 1200,
    ("coca", "tiny"): 544,
    ("coca", "small"): 1464,
    ("coca-strict", "tiny"): 576,
    ("coca-strict", "small"): 1544,
    ("coca-slack", "tiny"): 544,
    ("coca-slack", "small"): 1464,
}


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
    keys = {**SIZES[size], **PRESETS[name]}
    if (name, size) in _MATCHED_WIDTH:
        keys["intermediate_size"] = _MATCHED_WIDTH[name, size]
    if set(overrides) & {"hidden_size", "mlp", "bias"} and "intermediate_size" not in overrides:
        keys.pop("intermediate_size")  # matched to another shape: derive it again
    try:
        return ClearheadConfig(**{**keys, **overrides})
    except ClearheadError as error:
        raise ClearheadError(f"preset {name!r} at size {size!r}: {error}") from error
