"""Prefixes, and logits of learned sinks, set from text without training. A prefix, stored as keys
and values, takes over the first token's attention and large hidden state (arXiv 2410.05265).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from operator import itemgetter
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from clearhead.data.sources import passages
from clearhead.errors import ClearheadError
from clearhead.eval.sliding import perplexity
from clearhead.models.inspection import batches, evaluating
from clearhead.models.language_models import ClearheadForCausalLM
from clearhead.nn.null_keys import NOTHING
from clearhead.probe import AttentionCall, measure
from clearhead.probe.observation import Statistic
from clearhead.terminal import say

LONGEST = 64  # tokens of a prefix that is given
SEARCHED = 3  # tokens of one that is searched for
FREQUENT = 8  # candidates: the text's most frequent tokens, beside the tokenizer's special ones
# A prefix may fail on some texts alone, and within the first tokens: hence many short pieces.
PIECES, PIECE_LENGTH, BATCH_SIZE = 64, 16, 16
MASSIVE_SHARE = 0.1  # of the usual largest hidden state: a piece with more still has a massive one
JUDGED = 256  # tokens of two windows on which perplexity is compared
LOSS = 1.01  # of the perplexity without a prefix: no loss, by so few tokens
GAIN = 0.95  # of the largest hidden state: a further token has to bring it below this share
_CHARACTERS = 16  # of a document that are read for each token asked for
_HALVINGS = 60  # from 200 to below float64's resolution of a logit


def sample(
    text: str, tokenizer: Any, *, length: int, count: int, least: Literal[1, 2] = 1
) -> list[Tensor]:
    """Windows of tokens, int64 [length] each: first the middle of each document, then its rest;
    `text` is a source, as `--data.data` names them, or a text itself."""
    ranked: list[tuple[int, int, Tensor]] = []
    tokens, documents, wanted = 0, 0, _CHARACTERS * length * count
    # As in training, a text yields no special token.
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    for document in passages(text, say):
        start = max(0, (len(document) - wanted) // 2)
        ids = tokenizer(document[start : start + wanted], **plain).input_ids
        tokens = max(tokens, len(ids))
        pieces = torch.tensor(ids, dtype=torch.int64).split(length)[: len(ids) // length]
        ranked += [(abs(at - len(pieces) // 2), documents, one) for at, one in enumerate(pieces)]
        documents += bool(pieces)
        if documents == count:
            break
    if len(ranked) < least:
        few = f"{tokens:,} tokens, too few for {least} of {length}"
        raise ClearheadError(f"the longest document of {text} has {few}: give more text")
    return [piece for *_, piece in sorted(ranked, key=lambda entry: entry[:2])[:count]]


class Prefix(NamedTuple):
    """Tokens before every text, and the candidates `tried` in a search."""

    ids: tuple[int, ...]
    text: str
    tried: Sequence[dict[str, Any]] = ()


def searched_prefix(
    model: ClearheadForCausalLM, tokenizer: Any, windows: Sequence[Tensor]
) -> Prefix:
    """The prefix after which fewest pieces of text keep a massive state, and then the smallest one;
    perplexity rises by 1 % at most, and each token has to lower either."""
    length = min(PIECE_LENGTH, *map(len, windows))
    pieces = [piece for one in windows for piece in one.split(length) if len(piece) == length]
    count = min(PIECES, len(pieces))  # spread over the windows
    pieces = [pieces[index * len(pieces) // count] for index in range(count)]
    usual = median(largest_states(model, pieces, ()))
    judged = [window[:JUDGED] for window in windows[:2]]
    rank = itemgetter("fails", "largest")

    def measured(ids: list[int]) -> dict[str, Any]:
        largest = largest_states(model, pieces, ids)
        fails = sum(one > MASSIVE_SHARE * usual for one in largest)
        measures = {"largest": max(largest), "fails": fails, "pieces": count, "perplexity": None}
        return {"tokens": ids, "text": tokenizer.decode(ids), **measures}

    def judge(one: dict[str, Any]) -> float:
        read = perplexity(model, judged, prefix=tuple(one["tokens"]), batch_size=BATCH_SIZE)
        one["perplexity"] = read.perplexity
        return float(one["perplexity"])

    newline = tokenizer("\n", add_special_tokens=False).input_ids
    counts = Counter(token for window in windows for token in window.tolist())
    usable = [*(newline if len(newline) == 1 else ()), tokenizer.bos_token_id]
    usable += [tokenizer.eos_token_id, *(token for token, _ in counts.most_common(FREQUENT))]
    candidates = [token for token in dict.fromkeys(usable) if token is not None]
    best = plain = measured([])
    tried, without = [plain], judge(plain)
    for number in range(1, SEARCHED + 1):
        longer = sorted((measured([*best["tokens"], token]) for token in candidates), key=rank)
        tried += longer
        limit = LOSS * min(without, best["perplexity"])
        # Fewer failures than the best so far, or as many with much smaller states.
        better = (one for one in longer if rank(one) < (best["fails"], GAIN * best["largest"]))
        if (first := next((one for one in better if judge(one) <= limit), None)) is None:
            break
        best = first
        say(f"prefix of {number}: {best['text']!r}, largest hidden state {best['largest']:,.0f}")
    if best is plain:
        raise ClearheadError("no token lowers large hidden states without raising perplexity")
    return Prefix(ids=tuple(best["tokens"]), text=best["text"], tried=tried)


def largest_states(
    model: ClearheadForCausalLM, pieces: Sequence[Tensor], ids: Sequence[int]
) -> list[float]:
    """The largest absolute hidden state of each piece of text, int64 [L], after a prefix."""
    prefix_N = torch.tensor(list(ids), dtype=torch.long, device=model.device)
    largest = list[float]()
    with evaluating(model):
        for ids_BT in batches(model, pieces, BATCH_SIZE):
            rows_BL = torch.cat([prefix_N.expand(len(ids_BT), -1), ids_BT], 1)
            out = model.model(rows_BL, use_cache=False, output_hidden_states=True)
            states = [x[:, len(ids) :].abs().amax((1, 2)) for x in out.hidden_states]
            largest += torch.stack(states).amax(0).tolist()
    return largest


def fill(new: ClearheadForCausalLM, model: ClearheadForCausalLM, ids_BN: Tensor) -> None:
    """Set the prefix of `new` (`model` with `normalizer="key-value"` and a prefix of N) to the
    keys and values that `model` computes for the N tokens, averaged over the rows."""
    if (count := ids_BN.shape[1]) != (places := new.config.prefix_length):
        raise ClearheadError(f"{count} tokens for prefix_length={places}: give --length {places}")
    outputs: dict[Any, Tensor] = {}
    with ExitStack() as stack, evaluating(model):
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                hook = projection.register_forward_hook(
                    lambda module, given, out: outputs.update({module: out})
                )
                stack.enter_context(hook)
        model.model(ids_BN.to(model.device), use_cache=False)
    with torch.no_grad():
        pairs: Any = zip(new.model.layers, model.model.layers, strict=True)
        for own, before in ((layer.self_attn, source.self_attn) for layer, source in pairs):
            key_BNGD = outputs[before.k_proj].unflatten(-1, (own.groups, -1))
            key_BGND = key_BNGD.transpose(1, 2)
            key_BGND = key_BGND if own.k_norm is None else own.k_norm(key_BGND)
            value_BNGD = outputs[before.v_proj].unflatten(-1, (own.value_heads, -1))
            own.normalizer.key_bias.copy_(key_BGND.double().mean(0))
            own.normalizer.value_bias.copy_(value_BNGD.transpose(1, 2).double().mean(0))


class _Rows(Statistic):
    """The log-sum-exp of all logits, and the first token's weight, as tiles [2, H, rows] by layer.
    The first query, which sees one token, is left out."""

    def __init__(self) -> None:
        self.tiles = defaultdict[int, list[Tensor]](list)

    def observe(self, call: AttentionCall) -> None:
        for tile in call.scores():
            score_BHRS = tile.scores.masked_fill(~tile.visible, -torch.inf)
            score_BHRS = score_BHRS[:, :, tile.start == 0 :]
            total_BHR = score_BHRS.logsumexp(-1)
            both = torch.stack([total_BHR, (score_BHRS[..., 0] - total_BHR).exp()])
            self.tiles[call.layer].append(both.transpose(1, 2).flatten(2).double().cpu())


def calibrate(
    model: ClearheadForCausalLM, windows: Iterable[Tensor], layers: Collection[int]
) -> None:
    """Set the sinks' logits (`normalizer="sink"`) of these layers so that a sink's mean weight is
    that of the first token while the logits are too low to have an effect. No training."""
    blocks: Any = model.model.layers
    logits = {index: blocks[index].self_attn.normalizer.logit for index in layers}
    for logit in logits.values():
        torch.nn.init.constant_(logit, NOTHING)
    rows = _Rows()
    measure(model, windows, batch_size=1, attention=[rows])
    with torch.no_grad():
        for index, logit in logits.items():
            total_HN, share_HN = torch.cat(rows.tiles[index], 2)
            logit.copy_(_balanced(total_HN, share_HN.mean(1)))


def _balanced(totals_HN: Tensor, shares_H: Tensor) -> Tensor:
    """The logit b of each head at which the mean of σ(b − total) over seeing rows is this."""
    seen_HN = totals_HN.isfinite()
    low, high = (torch.full_like(shares_H, edge) for edge in (-100.0, 100.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        weight_HN = torch.sigmoid(middle[:, None] - totals_HN).where(seen_HN, 0)
        less = weight_HN.sum(1) / seen_HN.sum(1) < shares_H
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return (low + high) / 2
