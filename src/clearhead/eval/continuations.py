"""How likely a model finds what continues a context, many at a time.

The continuations of one question stand after one context, or after two that start alike, and may
start alike themselves. The longest is read with all before it, beside those of other questions of
like length; then, of the others, what follows their common start, again beside what is of like
length. Only what is scored meets the output matrix.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.diagnose.running import evaluating
from clearhead.errors import ClearheadError
from clearhead.eval.prefill import Kept, Prefill, Prompt, common, joined

# A batch is closed where the next is shorter than a share of its longest, for padding costs as text
# does; but not before it has tokens enough to be worth a call.
SPARSE, ENOUGH = 0.75, 512
# Contexts wait for more of them, so many times the tokens of a batch, before the rest is read: of
# more rows, those that run together differ less.
WAITING = 3
Unit = TypeVar("Unit")


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
                f"an answer of {len(continuation)} tokens is longer than the {limit} of the model "
                f"(it begins {' '.join(text.split())[:30]!r}): leave its questions out"
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
        batch_tokens: tokens of rows run together, at most (a single longer row runs alone), and
            somewhat over WAITING times as many are kept; it changes speed and memory, not scores.
        advanced: told how many rows were just scored.

    Raises:
        ClearheadError: a likelihood that is NaN.
    """
    scores = [[0.0] * len(rows) for rows in questions]

    def score(parts: Iterable[Tensor], batch: Sequence[_Tail], counts: Sequence[int]) -> None:
        for (question, choice), value in _scores(parts, batch, counts):
            scores[question][choice] += value
        advanced(sum(len(tail.answers) for tail in batch))

    def finish(begun: list[Kept], tails: list[_Tail]) -> None:
        kept = joined(begun)
        for batch in _batches(tails, _new, _whole, batch_tokens, equal=not prefill.pads):
            counts = [_asked(tail) for tail in batch]
            score(prefill.finish(kept, [tail.prompt for tail in batch], counts), batch, counts)

    begun, tails, waiting = list[Kept](), list[_Tail](), 0
    with evaluating(model):
        leads = prefill.leads
        begins = _whole_of_first if leads else _shared
        pieces = [_pieces(number, rows, prefill) for number, rows in enumerate(questions)]
        for some in _batches(pieces, begins, begins, batch_tokens):
            first = [piece[0] for piece in some]
            # What no other row needs is not kept.
            shared = [_shared(piece) if piece[1:] or not leads else 0 for piece in some]
            read = [begins(piece) for piece in some]
            rows = [tail.prompt.ids[:count] for tail, count in zip(first, read, strict=True)]
            kept, last_BTC = prefill.begin(rows, shared)
            if leads:
                assert last_BTC is not None  # there is something to read
                counts = [_asked(tail) for tail in first]
                score(prefill.logits(last_BTC, read, counts), first, counts)
            begun.append(kept)
            tails += [tail for piece in some for tail in (piece[1:] if leads else piece)]
            waiting += sum(shared)
            if waiting >= WAITING * batch_tokens:
                finish(begun, tails)
                begun, tails, waiting = [], [], 0
        finish(begun, tails)
    if any(score != score for row in scores for score in row):
        raise ClearheadError("the model's log-likelihood of an answer is NaN")
    return scores


class _Tail(NamedTuple):
    """What is read of a row, and by (question, choice) the tokens that are scored there.

    answers: after its last tokens. The last of an answer is not read, so that answers of one token
    are all scored by one reading. starts: after the last tokens of the context that it shares with
    others of its question, the starts of their answers.
    """

    prompt: Prompt
    answers: dict[tuple[int, int], tuple[int, ...]]
    starts: dict[tuple[int, int], tuple[int, ...]]


def _pieces(question: int, rows: Sequence[Row], prefill: Prefill) -> list[_Tail]:
    """What is read of a question, the longest first.

    All but a token of a row may be shared where the first is scored as it is read; or else what
    comes before any scored token.
    """
    read = [row.context + row.continuation[:-1] for row in rows]
    most = read if prefill.leads else [row.context for row in rows]
    shared = min(map(len, most)) - 1 if prefill.shares else 0
    shared = min(common(read[0], ids[:shared]) for ids in read)
    found: dict[tuple[int, ...], _Tail] = {}
    for choice, (ids, row) in enumerate(zip(read, rows, strict=True)):
        tail = found.setdefault(ids, _Tail(Prompt(ids[:shared], ids[shared:]), {}, {}))
        tail.answers[question, choice] = row.continuation
    first, *others = sorted(found.values(), key=_new, reverse=True)
    for tail in others:
        for name, answer in tail.answers.items():
            if start := answer[: -_new(tail)]:
                first.starts[name] = start
                tail.answers[name] = answer[len(start) :]
    return [first, *others]


def _shared(piece: Sequence[_Tail]) -> int:
    return len(piece[0].prompt.context)


def _whole_of_first(piece: Sequence[_Tail]) -> int:
    return _whole(piece[0])


def _asked(tail: _Tail) -> int:
    """Last tokens of a tail, of which the first is one after which something is scored."""
    starts = (_new(tail) + len(start) for start in tail.starts.values())
    return max([*map(len, tail.answers.values()), *starts])


def _new(tail: _Tail) -> int:
    return len(tail.prompt.tail)


def _whole(tail: _Tail) -> int:
    return len(tail.prompt.ids)


def _batches(
    units: Sequence[Unit],
    run: Callable[[Unit], int],
    held: Callable[[Unit], int],
    batch_tokens: int,
    *,
    equal: bool = False,
) -> Iterator[list[Unit]]:
    """Which units run together: neighbours by the tokens that each runs, the longest first.

    Args:
        held: tokens whose keys and values a unit takes, those that it runs among them.
        equal: whether only units that hold equally many may.
    """
    batch: list[Unit] = []
    first = most = 0
    for unit in sorted(units, key=lambda unit: (run(unit), held(unit)), reverse=True):
        full = max(most, held(unit)) * (len(batch) + 1) > batch_tokens
        sparse = run(unit) < SPARSE * first and first * len(batch) > ENOUGH
        if batch and (full or sparse or (equal and held(unit) != most)):
            yield batch
            batch, most = [], 0
        first = run(batch[0] if batch else unit)
        most = max(most, held(unit))
        batch.append(unit)
    if batch:
        yield batch


def _scores(
    parts: Iterable[Tensor], batch: Sequence[_Tail], counts: Sequence[int]
) -> Iterator[tuple[tuple[int, int], float]]:
    """log p of answers and of starts, from the logits [N, V] of the last `counts` of each tail."""
    places, tokens, owners, names = list[int](), list[int](), list[int](), list[tuple[int, int]]()
    end = 0
    for tail, count in zip(batch, counts, strict=True):
        end += count
        for scored, last in ((tail.answers, end), (tail.starts, end - _new(tail))):
            for name, answer in scored.items():
                places += range(last - len(answer), last)
                tokens += answer
                owners += [len(names)] * len(answer)
                names.append(name)
    place_M, token_M, owner_M = map(torch.tensor, (places, tokens, owners))
    sums = torch.zeros(len(names), dtype=torch.float64)
    start = 0
    for logits_NV in parts:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        here = (place_M >= start) & (place_M < start + len(wide_NV))
        row, token = ((x[here]).to(wide_NV.device) for x in (place_M - start, token_M))
        found = wide_NV.log_softmax(-1)[row, token]
        sums.index_add_(0, owner_M[here], found.double().cpu())
        start += len(wide_NV)
    return zip(names, sums.tolist(), strict=True)
