"""Quantising and dequantising the weights of a whole model, against what was promised."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.race import Ratio
from benchmarks.timing import take_turns
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.loading import best_device
from clearhead.quantize import linear_layers, scheme
from clearhead.quantize.linear import weights

# 110 M parameters, 85 M of them in linear layers.
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 32_000,
}
SCHEMES = ("w8a8-coarse", "w8a8-moderate", "w4-channel", "w4-group")
SECONDS = 2.0


def quantize(rounds: int) -> Iterator[Ratio]:
    """Every linear layer's weights under a scheme and back, against two seconds."""
    model = ClearheadForCausalLM(preset("transformer", **SHAPE)).to(best_device())
    layers = linear_layers(model)

    def side(name: str) -> Callable[[], None]:
        how = scheme(name).weights
        assert how is not None

        def run() -> None:
            with weights(layers, how):
                pass

        return run

    seconds = take_turns({name: side(name) for name in SCHEMES}, rounds)
    for name, times in seconds.items():
        yield Ratio(
            name="quantize, 110 M parameters",
            ours=f"{name}, seconds",
            peer=f"{SECONDS:g} s",
            ratio=median(times) / SECONDS,
            bound=1.0,
            seconds={name: times},
        )
