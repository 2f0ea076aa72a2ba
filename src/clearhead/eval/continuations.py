"""How likely a model finds what continues a context, many at a time.

The continuations of one question stand after one context, or after two that start alike: what they
share is read once, with that of other questions beside it, then all that differs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from clearhead.diagnose.running import evaluating
from clearhead.errors import ClearheadError
from clearhead.eval.prefill import Prefill, Prompt


class Row(NamedTuple):
    """Token ids: `context`, one or more, and `continuation`, one or more, which is scored."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]], limit: int | None) -> list[Row]:
    """Contexts and continuations as tokens, as the lm-evaluation-harness makes them.

    Both are tokenised together, with the special tokens that the tokenizer adds on its own, and cut
    where the context's own tokens end; spaces that end a context belong to its continuation. A
    context too long for the model loses its beginning.

    Args:
        limit: of the tokens that the model reads: all of a row but its last.

    Raises:
        ClearheadError: a continuation of no tokens, or of more than the limit.
    """
    contexts = [context.rstrip() for context, _ in pairs]
    before = tokenizer(contexts)["input_ids"]
    whole = tokenizer([context + continuation for context, continuation in pairs])["input_ids"]
    rows = []
    for (_, text), start, ids in zip(pairs, before, whole, strict=True):
        continuation = tuple(ids[len(start) :])
        if not continuation or not start:
            raise ClearheadError(f"{text!r} adds no token to what it continues, or that has none")
        if limit is not None and len(continuation) > limit:
            raise ClearheadError(
                f"an answer of {len(continuation)} tokens is longer than the {limit} of the model"
            )
        # A continuation as long as the limit keeps one token before it: the last is not read.
        kept = ids[: len(start)] if limit is None else ids[-limit - 1 : len(start)]
        rows.append(Row(tuple(kept), continuation))
    return rows


def log_likelihoods(
    model: Any,
    prefill: Prefill,
    questions: Sequence[Sequence[Row]],
    *,
    batch_tokens: int,
    advanced: Callable[[int], None],
) -> list[list[float]]:
    """log P(continuation | context) in nats, of each row of each question.

    Logarithms are taken in float32 at least and summed in float64.

    Args:
        batch_tokens: tokens of rows run together, at most (a single longer question runs alone); it
            changes speed and memory, not the scores.
        advanced: told how many rows were just scored.

    Raises:
        ClearheadError: a likelihood that is NaN.
    """
    prompts = [_prompts(rows) for rows in questions]
    scores = [[0.0] * len(rows) for rows in questions]
    for group in _groups(prompts, prefill, batch_tokens):
        with evaluating(model):
            logits_BKV = prefill.tails([prompts[question][choice] for question, choice in group])
            for logits_KV, (question, choice) in zip(logits_BKV, group, strict=True):
                ids = questions[question][choice].continuation
                target_N1 = torch.tensor(ids, device=logits_KV.device)[:, None]
                wide_NV = logits_KV[-len(ids) :].to(
                    torch.promote_types(logits_KV.dtype, torch.float32)
                )
                found_N1 = wide_NV.log_softmax(-1).gather(1, target_N1)
                scores[question][choice] = float(found_N1.double().sum())
        advanced(len(group))
    if any(score != score for row in scores for score in row):
        raise ClearheadError("the model's log-likelihood of an answer is NaN")
    return scores


def _prompts(rows: Sequence[Row]) -> list[Prompt]:
    """What is read of each row: what all of them share, at most up to the first that is scored."""
    read = [row.context + row.continuation[:-1] for row in rows]
    shared = min(len(row.context) for row in rows) - 1
    while any(ids[:shared] != read[0][:shared] for ids in read):
        shared -= 1
    return [Prompt(ids[:shared], ids[shared:]) for ids in read]


def _groups(
    prompts: Sequence[Sequence[Prompt]], prefill: Prefill, batch_tokens: int
) -> Iterator[list[tuple[int, int]]]:
    """Which rows run together, as (question, choice): a question's, where they share something.

    The longest first, so that neighbours are of like length: by what each choice runs, first.
    """
    places = [[(q, c) for c in range(len(rows))] for q, rows in enumerate(prompts)]
    units = places if prefill.shares else [[place] for unit in places for place in unit]

    def longest(unit: list[tuple[int, int]]) -> int:
        return max(len(prompts[question][choice].ids) for question, choice in unit)

    def cost(unit: list[tuple[int, int]]) -> tuple[int, int]:
        tails = [len(prompts[question][choice].tail) for question, choice in unit]
        return (max(tails) if prefill.shares else 0), longest(unit)

    group: list[tuple[int, int]] = []
    most = 0
    for unit in sorted(units, key=cost, reverse=True):
        length = longest(unit)
        full = max(most, length) * (len(group) + len(unit)) > batch_tokens
        if group and (full or (length != most and not prefill.pads)):
            yield group
            group, most = [], 0
        group = group + unit
        most = max(most, length)
    if group:
        yield group
