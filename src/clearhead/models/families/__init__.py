"""Model families of transformers that are the same function as a point of clearhead's axes."""

from clearhead.models.families import gpt, llama
from clearhead.models.families.family import Family

# By the name of the class for language; a model is exported to the first that suits it.
FAMILIES: dict[str, Family] = {
    family.model.__name__: family
    for family in (*llama.FAMILIES, *gpt.FAMILIES)
    if family.model is not None  # as where this transformers lacks it
}
