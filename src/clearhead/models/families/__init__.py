"""Model families of transformers that are the same function as a point of clearhead's axes."""

from clearhead.models.families.family import Family
from clearhead.models.families.gpt import GPT2, GPT_NEOX
from clearhead.models.families.llama import (
    DIFFLLAMA,
    FLINT,
    GRANITE_SWA,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
)

# By the name of the class for language; a model is exported to the first that suits it.
FAMILIES: dict[str, Family] = {
    family.model.__name__: family
    for family in (
        *(DIFFLLAMA, GRANITE_SWA, QWEN3, MISTRAL, LLAMA),
        *(QWEN2, FLINT, GPT2, GPT_NEOX),
    )
    if family.model is not None  # as where this transformers lacks it
}
