"""A trained model from which runs start: as it is, or on other mechanisms."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.data import Corpus, DataConfig
from clearhead.errors import ClearheadError
from clearhead.eval.fingerprints import parameters_digest
from clearhead.experiments.building import own_text, refuse_tokenizer
from clearhead.models.conversion import imported, require_convertible
from clearhead.models.inspection import longest_text
from clearhead.models.loading import load
from clearhead.models.starts import Start, started, target
from clearhead.terminal import say
from clearhead.train import TrainConfig
from clearhead.train.adapters import merge


@dataclass(frozen=True)
class Base:
    """A causal model of any library, its tokenizer, and the text as that reads it."""

    name: str
    model: Any
    corpus: Corpus

    def start(self, preset: str | None, settings: Mapping[str, Any]) -> Start:
        """A copy on the mechanisms of a preset, and of settings over it.

        Without a change of mechanism it is the model itself, in its own class.

        Raises:
            ClearheadError: for an unknown preset or setting, and as `imported` and `started`.
        """
        changes = target(preset, settings)
        if changes:
            return started(imported(self.model), changes)
        return Start(copy.deepcopy(self.model), (), ())

    def describe(self) -> dict[str, str]:
        """The model's name and a hash of its weights, for records."""
        return {"name": self.name, "parameters": parameters_digest(self.model)}


def open_base(
    name: str, data: DataConfig, settings: TrainConfig, *, trust_remote_code: bool
) -> Base:
    """Open a model to go on from, in float32, and prepare its text.

    Raises:
        ClearheadError: for a model that cannot be opened or is stored in few bits, a tokenizer
            beside its own or with more entries than it has, and windows longer than it can read.
    """
    refuse_tokenizer(data)
    require_convertible(name, trust_remote_code=trust_remote_code)
    model, tokenizer = load(name, trust_remote_code=trust_remote_code)
    merge(model)
    limit, length = longest_text(model), settings.sequence_length
    if limit is not None and length > limit:
        raise ClearheadError(
            f"windows of {length} tokens are more than the {limit} positions of {name}: "
            f"give --train.sequence-length {limit}"
        )
    corpus = own_text(data, tokenizer, progress=say)
    entries = model.get_input_embeddings().num_embeddings
    if corpus.vocabulary_size > entries:
        raise ClearheadError(
            f"the tokenizer of {name} has ids up to {corpus.vocabulary_size - 1}, and its model "
            f"{entries} embeddings: it is another model's; restore the one it was trained with"
        )
    return Base(name, model.float(), corpus)
