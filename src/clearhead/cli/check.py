"""Compare every attention implementation that can run on this machine with the model's eager
attention in float64: logits and gradients, alone, padded, packed, cached, with windows and sinks.

examples:
  clearhead check ./gpt-oss-20b --attention clearhead flex_attention --dtype bfloat16
  clearhead check init:sink --set sliding_window=64 --compile
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from tyro.conf import Positional

from clearhead.errors import ClearheadError
from clearhead.lab.sweep_configs import FRESH
from clearhead.metavars import Model, Name, OpensModels, Overrides
from clearhead.ranges import Natural
from clearhead.terminal import show


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A model whose attention is checked."""

    model: Positional[Model]
    """A folder, a run or a hub name; init:NAME for a preset with fresh weights."""
    attention: tuple[Name, ...] = ()
    """Values of attn_implementation to check; by default those in common use."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the implementations; the flash kernels need one of the 16-bit types."""
    compile: bool = False
    """Check the model under torch.compile too."""
    timed: Natural = 128
    """Tokens of the text on which time and memory are measured; 0 measures neither."""
    seed: Natural = 0
    """Seed of the texts and of the sinks."""
    set: Overrides = field(default_factory=dict)
    """Changes to the configuration of init:NAME."""


def run(command: Command) -> int:
    from clearhead.diagnose.attention_check import DTYPES, check_attention, in_words
    from clearhead.lab.runs import load_model, new_model
    from clearhead.models import preset
    from clearhead.models.loading import best_device

    if (fresh := command.model.removeprefix(FRESH)) != command.model:
        model = new_model(preset(fresh, **command.set)).to(best_device())
    elif command.set:
        raise ClearheadError("--set has no effect on a trained model: check init:NAME")
    else:
        model, _ = load_model(command.model, ("causal", "masked"), command.trust_remote_code)
    how: Any = {name: getattr(command, name) for name in ("compile", "timed", "seed")}
    results = check_attention(model, command.attention, dtype=DTYPES[command.dtype], **how)
    if all(one.lacks for one in results):
        names = ", ".join(one.name for one in results)
        raise ClearheadError(f"none of {names} loads here ({results[0].lacks}): try eager or sdpa")
    show(f"{type(model).__name__} in {command.dtype}, beside eager attention in float64")
    show("\n".join(in_words(results)))
    return int(any(one.wrong for one in results))
