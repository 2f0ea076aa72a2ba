"""The tiny architectures by what diagnose can see in them."""

from typing import Any

import tests_architectures as architectures

VOCABULARY, LONGEST = architectures.VOCABULARY, 64
# No rotary positions, no plain ones, or in a layout that `clearhead convert` does not keep.
UNTURNED = (
    *("GPT-2", "OPT", "BERT", "RoBERTa", "alibi", "coca-slack"),
    *("Gemma2", "Gemma3", "Cohere", "Phi", "GPT-NeoX", "gpt-oss", "ModernBERT"),
)
UNOBSERVED = (*architectures.WITHOUT_INTERFACE, *architectures.RECURRENT)
ENCODERS = ("ModernBERT", architectures.OUR_ENCODER, "BERT", "RoBERTa")
ROTARY = tuple(
    name
    for name in (*architectures.OTHERS, *architectures.OURS, "coca", *ENCODERS)
    if name not in (*UNTURNED, *UNOBSERVED, "gpt2")
)


def make(name: str) -> Any:
    """The model, of three layers and 64 positions; a window sees 20 tokens where there is one."""
    _, extra = architectures.OTHERS.get(name, ("", {}))
    changes = {"sliding_window": 20} if "sliding_window" in extra else {}
    shape = {"num_hidden_layers": 3, "max_position_embeddings": LONGEST}
    return architectures.make(name, **shape, **changes)
