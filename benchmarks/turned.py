"""A turned model with a prefix against the Llama that it was converted from."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from clearhead.lab.prefixes import fill
from clearhead.models.conversion import converted
from clearhead.models.loading import best_device
from clearhead.models.rotated import rotated
from clearhead.models.starts import started

# SmolLM2-135M's.
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
TURNED = {"mlp_rotation": "hadamard"}
PREFIX = {"normalizer": "key-value", "prefix_length": 1}
TOKENS, DECODED = 512, 4
BOUND = 1 / 0.97  # 0.97 of Llama's throughput


def turned(rounds: int) -> Iterator[Ratio]:
    """A forward pass of a text, and steps of decoding after it, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(best_device()).eval()
    plain = converted(llama)
    basis = rotated(plain, ("residual", "values"))
    both = started(basis, TURNED | PREFIX).model
    fill(both, basis, torch.tensor([[0]]))
    models = {
        "Llama": llama,
        "transformer": plain,
        "turned": started(basis, TURNED).model,
        "turned, prefix": both,
    }
    ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS), device=best_device())
    work = {f"decoding, {DECODED} tokens": _decoding, f"{TOKENS} tokens": _forward}
    for name, side in work.items():
        seconds = take_turns({kind: side(model, ids) for kind, model in models.items()}, rounds)
        for kind in list(models)[1:]:
            two = {each: seconds[each] for each in (kind, "Llama")}
            yield ratio_of(name, kind, "Llama", BOUND, two)


def _forward(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def step() -> None:
        model(ids, use_cache=False)

    return step


def _decoding(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values

    @torch.no_grad()
    def step() -> None:
        for _ in range(DECODED):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-DECODED)

    return step
