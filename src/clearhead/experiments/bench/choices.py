"""Multiple choice with contexts read once, against whole rows of context and continuation."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from clearhead.diagnose.running import evaluating
from clearhead.eval.continuations import Row, log_likelihoods
from clearhead.eval.prefill import Prefill
from clearhead.experiments.bench.race import Ratio, ratio_of, take_turns
from clearhead.experiments.building import best_device
from clearhead.models import ClearheadForCausalLM, preset

QUESTIONS, CHOICES = 64, 4
# Tokens of HellaSwag's contexts and endings, about: uniform from the first to the second.
CONTEXT, ENDING = (30, 110), (10, 40)
ROWS = 16  # of the peer's batch


def choices(rounds: int) -> Iterator[Ratio]:
    """Items as long as HellaSwag's; the peer runs rows by length, as lm-eval's HFLM does."""
    torch.manual_seed(0)
    model = ClearheadForCausalLM(preset("transformer", "tiny")).to(best_device()).eval()
    questions = _questions(model.config.vocab_size)
    with evaluating(model):
        prefill = Prefill(model)
    longest = max(len(row.context + row.continuation) for rows in questions for row in rows)

    def shared() -> None:
        log_likelihoods(
            model, prefill, questions, batch_tokens=ROWS * longest, advanced=lambda _count: None
        )

    def whole() -> None:
        _whole_rows(model, [row for rows in questions for row in rows])

    seconds = take_turns({"contexts read once": shared, "whole rows": whole}, rounds)
    yield ratio_of("choices", "contexts read once", "whole rows", 1 / 1.5, seconds)


def _questions(vocabulary: int) -> list[list[Row]]:
    draw = np.random.default_rng(0)

    def ids(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(draw.integers(0, vocabulary, draw.integers(*bounds, endpoint=True)).tolist())

    contexts = [ids(CONTEXT) for _ in range(QUESTIONS)]
    return [[Row(context, ids(ENDING)) for _ in range(CHOICES)] for context in contexts]


def _whole_rows(model: ClearheadForCausalLM, rows: list[Row]) -> list[float]:
    """Padded on the right, the longest first; the logits of every token are made."""
    rows = sorted(rows, key=lambda row: len(row.context + row.continuation), reverse=True)
    scores = []
    with evaluating(model):
        for start in range(0, len(rows), ROWS):
            batch = rows[start : start + ROWS]
            ids = [torch.tensor((row.context + row.continuation)[:-1]) for row in batch]
            ids_BT = pad_sequence(ids, batch_first=True).to(model.device)
            logs_BTV = model(input_ids=ids_BT, use_cache=False).logits.float().log_softmax(-1)
            for logs_TV, row in zip(logs_BTV, batch, strict=True):
                target_N1 = torch.tensor(row.continuation, device=model.device)[:, None]
                first = len(row.context) - 1
                picked_N1 = logs_TV[first : first + len(target_N1)].gather(1, target_N1)
                scores.append(float(picked_N1.sum()))
    return scores
