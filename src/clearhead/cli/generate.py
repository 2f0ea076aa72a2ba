"""Continue a text.

examples:
  clearhead generate runs/train/final "def read("
  clearhead generate ./SmolLM2-135M "The weather today" --tokens 40 --temperature 0
"""

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional

from clearhead.errors import ClearheadError
from clearhead.metavars import Model, OpensModels, Text
from clearhead.ranges import Count, Range, Temperature
from clearhead.terminal import write


@dataclass(frozen=True, kw_only=True)
class Command(OpensModels):
    """A text to continue."""

    model: Positional[Model]
    """A checkpoint's folder (RUN/final), or a hub name."""
    prompt: Positional[Text] = ""
    """The text to continue; empty starts a document."""
    tokens: Count = 100
    """Largest number of new tokens."""
    temperature: Temperature = 0.8
    """0 takes the likeliest token each time. Penalties and beams of the model's own
    generation_config are left out."""
    top_p: Annotated[float, Range("a share above 0, at most 1", lambda x: 0 < x <= 1)] = 0.95
    """Sample from the likeliest tokens that hold this share of the probability."""
    seed: int = 0
    """Seed of the sampling."""


def run(command: Command) -> int:
    import torch

    from clearhead.lab.runs import load_model
    from clearhead.models import inspection

    model, tokenizer = load_model(command.model, trust_remote_code=command.trust_remote_code)
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if not (ids := ids + tokenizer(command.prompt, add_special_tokens=False)["input_ids"]):
        raise ClearheadError("this tokenizer has no begin token: give a prompt to continue")
    prompt = torch.tensor([ids], device=model.device)
    inspection.check_tokens(model, prompt)
    read = len(ids) + command.tokens - 1  # the last token is not read again
    inspection.require_positions(model, read, "shorten the prompt or ask for fewer --tokens")
    torch.manual_seed(command.seed)
    options: Any = {"max_new_tokens": command.tokens, "attention_mask": torch.ones_like(prompt)}
    options |= {"logits_processor": [inspection.finite], "pad_token_id": tokenizer.pad_token_id}
    if command.temperature > 0:
        options |= {"do_sample": True, "temperature": command.temperature}
        options |= {"top_p": command.top_p, "top_k": 0}
    out = inspection.generating_plainly(model).generate(prompt, **options)
    write(tokenizer.decode(out[0], skip_special_tokens=True))
    return 0
