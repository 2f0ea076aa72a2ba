"""Answers of a model: greedy decoding, and log-likelihoods of given answers."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.eval.prefill import Prefill, Prompt, State
from clearhead.eval.rope_limits import check_length, reset_dynamic_rope
from clearhead.models.inspection import evaluating


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        written: the tokens of greedy decoding, up to an end token or as many as were asked for.
        loss: −log p of each token of the given answer, its earlier ones given (teacher forcing).
        right: whether each of these tokens was the likeliest. All of them are if and only if greedy
            decoding starts with the whole answer.
    """

    written: tuple[int, ...]
    loss: tuple[float, ...]
    right: tuple[bool, ...]


class Reader:
    """Reads prompts with one model, once for both greedy and forced answers.

    Args:
        model: a causal language model of transformers.
        batch_tokens: tokens of prompts and answers run together, at most (a single longer prompt
            runs alone); it changes speed and memory, not the answers.
        ends: the tokens that end an answer.
    """

    def __init__(self, model: Any, *, batch_tokens: int, ends: Collection[int] = ()) -> None:
        self.model = model
        self._batch_tokens = batch_tokens
        self._ends = frozenset(ends)
        with evaluating(model):
            self.prefill = Prefill(model)

    def ask(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[tuple[int, ...]],
        *,
        new_tokens: int = 0,
        advanced: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answers to the prompts, in their order.

        Args:
            prompts: those that share a context, or a long start, best stand together.
            answers: the right one of each, scored; may be empty.
            new_tokens: how many tokens greedy decoding writes; 0 leaves it out.
            advanced: called with the size of each batch.

        Raises:
            ClearheadError: a prompt and its answer longer than the model's positions.
        """
        room = [max(new_tokens, len(answer)) for answer in answers]
        longest = max(len(p.ids) + r for p, r in zip(prompts, room, strict=True))
        check_length(self.model, longest)
        found: dict[int, Answer] = {}
        for group in self._groups(prompts, room):
            with evaluating(self.model):
                answered = self._batch(
                    [prompts[i] for i in group], [answers[i] for i in group], new_tokens
                )
            found.update(zip(group, answered, strict=True))
            if advanced is not None:
                advanced(len(group))
        return [found[index] for index in range(len(prompts))]

    def weigh(self, prompt: Prompt, answers: Sequence[tuple[int, ...]]) -> list[float]:
        """log p of each answer after one prompt, summed over its tokens, in nats.

        The prompt is read once; an answer's tokens in one pass where that is exact, or one by one.

        Raises:
            ClearheadError: a prompt and its answer longer than the model's positions.
        """
        each = len(prompt.ids) + max(map(len, answers))
        check_length(self.model, each)
        found: list[float] = []
        with evaluating(self.model):
            state = self.prefill.read([prompt])
            rows = max(1, self._batch_tokens // each)
            if not all(hasattr(layer, "batch_repeat_interleave") for layer in state.cache.layers):
                rows = 1  # a recurrent state is copied, not repeated
            for start in range(0, len(answers), rows):
                some = list(answers[start : start + rows])
                reset_dynamic_rope(self.model)  # the answers before were as long, or longer
                rows_of_it = _repeated(state, len(some))
                if self.prefill.shares:
                    losses = self._at_once(rows_of_it, some)
                else:
                    losses, _ = self._forced(rows_of_it, some, keep=False)
                found += [-math.fsum(loss) for loss in losses]
        return found

    def _groups(self, prompts: Sequence[Prompt], room: Sequence[int]) -> Iterator[list[int]]:
        """Batches of prompts: neighbours, and of one length where padding is not exact."""
        order = list(range(len(prompts)))
        if not self.prefill.pads:
            order.sort(key=lambda index: len(prompts[index].ids))
        group: list[int] = []
        longest = 0
        for index in order:
            length = len(prompts[index].ids) + room[index]
            unequal = group and len(prompts[index].ids) != len(prompts[group[0]].ids)
            full = max(longest, length) * (len(group) + 1) > self._batch_tokens
            if group and (full or (unequal and not self.prefill.pads)):
                yield group
                group, longest = [], 0
            group.append(index)
            longest = max(longest, length)
        if group:
            yield group

    def _batch(
        self, prompts: list[Prompt], answers: list[tuple[int, ...]], new_tokens: int
    ) -> list[Answer]:
        state = self.prefill.read(prompts)
        losses, rights = self._forced(state, answers, keep=new_tokens > 0)
        written = self._greedy(state, new_tokens)
        return [
            Answer(written=tokens, loss=loss, right=right)
            for tokens, loss, right in zip(written, losses, rights, strict=True)
        ]

    def _at_once(self, state: State, answers: list[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """As `_forced`, in one pass: a step copies the whole cache."""
        longest = max(map(len, answers))
        padded_BT = torch.tensor(
            [[*answer, *[0] * (longest - len(answer))] for answer in answers],
            device=state.mask.device,
        )
        logits = [state.logits[:, None]]
        if longest > 1:
            logits.append(self.prefill.follow(state, padded_BT[:, :-1]))
        loss_BT = -_log_softmax(torch.cat(logits, 1)).gather(2, padded_BT[..., None])[..., 0]
        return [tuple(row[: len(a)]) for row, a in zip(loss_BT.tolist(), answers, strict=True)]

    def _forced(
        self, state: State, answers: list[tuple[int, ...]], *, keep: bool
    ) -> tuple[list[tuple[float, ...]], list[tuple[bool, ...]]]:
        """Losses token by token: exact where rotary frequencies follow the length, too."""
        longest = max(map(len, answers))
        if keep and longest > 1:
            state = State(cache=copy.deepcopy(state.cache), mask=state.mask, logits=state.logits)
        padded_BT = torch.zeros(len(answers), longest, dtype=torch.int64)
        for row, answer in enumerate(answers):
            padded_BT[row, : len(answer)] = torch.tensor(answer, dtype=torch.int64)
        padded_BT = padded_BT.to(state.mask.device)
        losses, rights = [], []
        for place in range(longest):
            target_B1 = padded_BT[:, place : place + 1]
            losses.append(-_log_softmax(state.logits).gather(1, target_B1)[:, 0])
            rights.append(state.logits.argmax(-1) == target_B1[:, 0])
            if place + 1 < longest:
                self.prefill.step(state, target_B1[:, 0])
        if not longest:
            return [()] * len(answers), [()] * len(answers)
        loss_BT, right_BT = torch.stack(losses, 1).tolist(), torch.stack(rights, 1).tolist()
        return (
            [tuple(row[: len(a)]) for row, a in zip(loss_BT, answers, strict=True)],
            [tuple(row[: len(a)]) for row, a in zip(right_BT, answers, strict=True)],
        )

    def _greedy(self, state: State, new_tokens: int) -> list[tuple[int, ...]]:
        written: list[list[int]] = [[] for _ in state.mask]
        open_ = [True] * len(written)
        for place in range(new_tokens):
            token_B = state.logits.argmax(-1)
            for row, token in enumerate(token_B.tolist()):
                open_[row] = open_[row] and token not in self._ends
                if open_[row]:
                    written[row].append(token)
            if not any(open_):
                break
            if place + 1 < new_tokens:
                self.prefill.step(state, token_B)
        return [tuple(tokens) for tokens in written]


def ends_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens: the tokenizer's, and those of the model's generation_config.

    A chat model's turn may end by another token than a text.
    """
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _repeated(state: State, rows: int) -> State:
    """A copy of a state of one row, as so many rows."""
    cache = copy.deepcopy(state.cache)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    return State(
        cache=cache, mask=state.mask.expand(rows, -1), logits=state.logits.expand(rows, -1)
    )


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
