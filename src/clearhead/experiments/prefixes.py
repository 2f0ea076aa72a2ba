"""Prefixes that need no training: tokens before the text, as learned keys and values.

The first token of a text takes attention for want of anything better and grows a hidden state
thousands of times the others'. A token that stands before every text takes that place: its keys and
values are kept, and nothing of the text grows (PrefixQuant, arXiv 2410.05265).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from clearhead.errors import ClearheadError
from clearhead.models.causal import ClearheadForCausalLM
from clearhead.models.conversion import TOLERANCE
from clearhead.models.inspection import batches, evaluating
from clearhead.terminal import say

AUTO = "auto"
LONGEST = 64  # tokens of a prefix that is given
SEARCHED = 3  # tokens of one that is searched for
FREQUENT = 8  # candidates: the text's most frequent tokens, beside the tokenizer's special ones
WINDOWS, LENGTH = 2, 256  # of text that a candidate is measured on
LOSS = 1.01  # of the perplexity without a prefix: no loss, by so few tokens
GAIN = 0.95  # of the largest hidden state: a further token has to bring it below this share
_ESCAPES = {r"\n": "\n", r"\t": "\t"}
_CHECKED = 64  # tokens after the prefix whose logits are compared


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens to stand before every text, and what a search measured.

    Attributes:
        tried: {"tokens", "text", "perplexity", "largest"} of each candidate, the first without a
            prefix; "largest" is the largest absolute hidden state of the text.
    """

    ids: tuple[int, ...]
    text: str
    tried: list[dict[str, Any]] = field(default_factory=list)


def given_prefix(text: str, tokenizer: Any) -> Prefix:
    """The tokens of a text, in which backslash n and backslash t are a newline and a tab.

    Raises:
        ClearheadError: no token, or more than `LONGEST`.
    """
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not 1 <= len(ids) <= LONGEST:
        raise ClearheadError(
            f"the prefix {text!r} has {len(ids):,} tokens: give 1 to {LONGEST}, such as \\n"
        )
    return Prefix(ids=tuple(ids), text=text)


def searched_prefix(
    model: ClearheadForCausalLM, tokenizer: Any, windows: Sequence[Tensor]
) -> Prefix:
    """The tokens before the text that leave it the smallest largest hidden state, at no loss.

    Candidates are a newline, the tokenizer's special tokens and the text's most frequent ones.
    Those after which perplexity is more than 1 % higher than without a prefix are left out. A
    second and a third token are added where they lower the largest state by 5 % more.

    Raises:
        ClearheadError: no candidate lowers it at no loss.
    """
    read = [window[:LENGTH] for window in windows[:WINDOWS]]
    tried = [_measured(model, tokenizer, read, ())]
    best = plain = tried[0]
    candidates = list(_candidates(tokenizer, read))
    for number in range(1, SEARCHED + 1):
        longer = [
            _measured(model, tokenizer, read, (*best["tokens"], candidate))
            for candidate in candidates
        ]
        tried += longer
        fit = [one for one in longer if one["perplexity"] <= LOSS * plain["perplexity"]]
        found = min(fit, key=lambda one: one["largest"], default=best)
        if not found["largest"] < GAIN * best["largest"]:
            break
        best = found
        say(f"prefix of {number}: {best['text']!r}, largest hidden state {best['largest']:,.0f}")
    if best is plain:
        raise ClearheadError(
            f"none of {len(candidates)} tokens before the text lowers its largest hidden state, "
            f"{plain['largest']:,.0f}, at no loss of perplexity: give a prefix, such as \\n"
        )
    return Prefix(ids=tuple(best["tokens"]), text=best["text"], tried=tried)


def _candidates(tokenizer: Any, windows: Sequence[Tensor]) -> Iterator[int]:
    newline = tokenizer("\n", add_special_tokens=False).input_ids
    counts = Counter(token for window in windows for token in window.tolist())
    frequent = [token for token, _ in counts.most_common(FREQUENT)]
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    seen = dict.fromkeys([*newline[:1], *special, *frequent])
    yield from (token for token in seen if token is not None)


def _measured(
    model: ClearheadForCausalLM, tokenizer: Any, windows: Sequence[Tensor], ids: tuple[int, ...]
) -> dict[str, Any]:
    loss, tokens, largest = 0.0, 0, 0.0
    with evaluating(model):
        for ids_BT in batches(model, windows, 1):
            cache = DynamicCache(config=model.config)
            if ids:
                model(input_ids=_row(ids, model), past_key_values=cache)
            out = model(input_ids=ids_BT, past_key_values=cache, output_hidden_states=True)
            largest = max(largest, *(float(x.abs().max()) for x in out.hidden_states))
            logits = out.logits[0, :-1].float()
            loss += float(F.cross_entropy(logits, ids_BT[0, 1:], reduction="sum"))
            tokens += ids_BT.shape[1] - 1
    return {
        "tokens": list(ids),
        "text": tokenizer.decode(list(ids)),
        "perplexity": math.exp(loss / tokens),
        "largest": largest,
    }


def check_prefix(model: ClearheadForCausalLM, changes: dict[str, Any]) -> None:
    """Raise a ClearheadError where keys and values of a token cannot stand before the text."""
    if (wanted := changes.get("normalizer")) is not None:
        raise ClearheadError(
            f"--prefix makes normalizer='key-value', and --to asks for {wanted!r}: give one"
        )
    for index in range(model.config.num_hidden_layers):
        if (found := model.config.layer(index).normalizer) != "softmax":
            raise ClearheadError(
                f"--prefix is for normalizer='softmax', and layer {index} has {found!r}, where "
                "queries need no first token: leave --prefix out"
            )


def fill(made: ClearheadForCausalLM, model: ClearheadForCausalLM, ids_BN: Tensor) -> None:
    """Give `made` the keys and values that `model` has of the tokens, their mean over the rows.

    Args:
        made: `model` with `normalizer="key-value"` and as many places as there are tokens.
    """
    keys, values = list[Tensor](), list[Tensor]()
    attentions: list[Any] = [layer.self_attn for layer in model.model.layers]
    hooks = [
        part.register_forward_hook(lambda module, given, out, into=into: into.append(out))
        for attention in attentions
        for part, into in ((attention.k_proj, keys), (attention.v_proj, values))
    ]
    try:
        with evaluating(model):
            model.model(ids_BN.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, key_BNC, value_BNC in zip(made.model.layers, keys, values, strict=True):
        attention: Any = layer.self_attn
        key_BGND = key_BNC.unflatten(-1, (attention.groups, -1)).transpose(1, 2)
        value_BGND = value_BNC.unflatten(-1, (attention.value_heads, -1)).transpose(1, 2)
        with torch.no_grad():
            key_BGND = attention.k_norm(key_BGND)
            attention.normalizer.key_bias.copy_(key_BGND.double().mean(0))
            attention.normalizer.value_bias.copy_(value_BGND.double().mean(0))


def check_filled(
    made: ClearheadForCausalLM, model: ClearheadForCausalLM, ids: tuple[int, ...]
) -> float:
    """Compare `made` with `model` after the prefix, on random tokens.

    Returns:
        The Euclidean distance of the logits over the length of the model's.

    Raises:
        ClearheadError: other logits, or too few positions for a prefix and a text.
    """
    longest = model.config.max_position_embeddings
    room = min(longest, model.config.sliding_window or longest)
    count = min(_CHECKED, room - len(ids))
    if count < 1:
        raise ClearheadError(
            f"a prefix of {len(ids)} tokens leaves no room for a text within {room} positions: "
            "give a shorter one"
        )
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(model.config.vocab_size, (1, count), generator=draw).to(model.device)
    with evaluating(model), evaluating(made):
        whole = model(input_ids=torch.cat([_row(ids, model), text], 1)).logits[:, len(ids) :]
        apart = whole.double() - made(input_ids=text).logits.double()
    relative = float(apart.norm() / whole.double().norm())
    if not relative <= TOLERANCE:
        raise ClearheadError(
            f"the model with a prefix gives other logits than the one after it, by {relative:.2g} "
            "of their size: please report this model"
        )
    return relative


def _row(ids: Sequence[int], model: ClearheadForCausalLM) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)
