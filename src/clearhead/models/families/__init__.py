"""Model families of transformers that are the same function as a point of clearhead's axes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.families.diffllama import from_diffllama, to_diffllama
from clearhead.models.families.flint import FLINT
from clearhead.models.families.gpt2 import from_gpt2
from clearhead.models.families.gpt_neox import from_gpt_neox
from clearhead.models.families.granite_swa import GRANITE_SWA
from clearhead.models.families.llama import LLAMA
from clearhead.models.families.mistral import MISTRAL
from clearhead.models.families.qwen import QWEN2, QWEN3


class Family(NamedTuple):
    """A family, by the name of its class for language.

    Attributes:
        read: makes a clearhead model of one.
        write: makes one of a clearhead model; None where nothing is exported to it.
        suits: whether a clearhead configuration is to be written as one.
    """

    read: Callable[[Any], ClearheadForCausalLM]
    write: Callable[[ClearheadForCausalLM], Any] | None = None
    suits: Callable[[Any], bool] = lambda config: False


FAMILIES: dict[str, Family] = {
    "DiffLlamaForCausalLM": Family(
        from_diffllama, to_diffllama, lambda config: config.maps == "differential"
    ),
    "GraniteSWAForCausalLM": Family(
        GRANITE_SWA.imported,
        GRANITE_SWA.exported,
        lambda config: config.normalizer in ("softmax1", "sink"),
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3.imported, QWEN3.exported, lambda config: config.qk_norm == "rmsnorm"
    ),
    "MistralForCausalLM": Family(
        MISTRAL.imported, MISTRAL.exported, lambda config: config.sliding_window is not None
    ),
    # Of what no other suits: Llama says what it lacks.
    "LlamaForCausalLM": Family(LLAMA.imported, LLAMA.exported, lambda config: True),
    "Qwen2ForCausalLM": Family(QWEN2.imported),
    "FlintForCausalLM": Family(FLINT.imported),
    "GPT2LMHeadModel": Family(from_gpt2),
    "GPTNeoXForCausalLM": Family(from_gpt_neox),
}
