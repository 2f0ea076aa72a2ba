"""Named sizes: the shape of the baseline, to which presets are matched in parameters.

A paper's size is named after it. Counts that the papers state, and where they contradict
themselves, are in docs/recipes.md.
"""

from typing import Any


def _size(
    layers: int, width: int, heads: int, vocabulary: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        **more,
    }


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
    "languini": _size(
        12, 768, 12, 16_384, 512, intermediate_size=3072, position="alibi", mlp="gelu"
    ),
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
