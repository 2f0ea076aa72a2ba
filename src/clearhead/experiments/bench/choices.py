"""Multiple choice with contexts read once, against the lm-evaluation-harness's own model class."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from clearhead.diagnose.running import evaluating
from clearhead.errors import require
from clearhead.eval.continuations import Row, log_likelihoods
from clearhead.eval.harness import quiet
from clearhead.eval.harness_tasks import EXTRA
from clearhead.eval.prefill import Prefill
from clearhead.experiments.bench.race import Ratio, faster_paths, take_turns
from clearhead.experiments.building import best_device
from clearhead.models import ClearheadForCausalLM, preset

QUESTIONS = 256
TOKENS = 2048  # of our batches
ROWS = (4, 16)  # of the peer's batches: the faster counts
# Where the lengths' distributions are given; the tails are long, so 0.97 is one of them.
PLACES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)
Quantiles = tuple[float, ...]
NONE, ONE = (0,) * len(PLACES), (1,) * len(PLACES)


class Kind(NamedTuple):
    """Lengths of a data set's items in tokens of a vocabulary of 4,096, at each of PLACES.

    shared: what a question's contexts start with. own: the rest of each context. answer: what is
    scored. spread: how far the answers of a question are apart, in shares of the distribution.
    alike: the share of the shortest answer that all of a question's start with.
    """

    choices: int
    shared: Quantiles
    own: Quantiles
    answer: Quantiles
    spread: float
    alike: Quantiles


# Of the first 1,200 items of each; an answer of ARC, PIQA and BoolQ follows "Question: … Answer:".
KINDS = {
    "HellaSwag": Kind(
        choices=4,
        shared=(14, 24, 29, 32, 35, 38, 42, 46, 49, 56, 64, 91),
        own=NONE,
        answer=(3, 9, 11, 13, 14, 16, 18, 21, 24, 30, 39, 101),
        spread=0.25,
        alike=NONE,
    ),
    "ARC": Kind(
        choices=4,
        shared=(15, 24, 27, 29, 33, 37, 43, 49, 57, 72, 96, 271),
        own=NONE,
        answer=(1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 19, 33),
        spread=0.2,
        alike=NONE,
    ),
    "PIQA": Kind(
        choices=2,
        shared=(11, 15, 18, 19, 21, 22, 23, 24, 26, 29, 34, 45),
        own=NONE,
        answer=(2, 8, 11, 13, 17, 21, 27, 35, 45, 70, 113, 338),
        spread=0.05,
        alike=(0, 0, 0.06, 0.14, 0.22, 0.31, 0.41, 0.5, 0.62, 0.75, 0.91, 1),
    ),
    "WinoGrande": Kind(
        choices=2,
        shared=(1, 16, 18, 19, 20, 21, 22, 24, 26, 29, 33, 40),
        own=(0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 9),
        answer=(1, 3, 4, 5, 6, 7, 7, 9, 10, 12, 15, 30),
        spread=0.0,
        alike=NONE,
    ),
    "BoolQ": Kind(
        choices=2,
        shared=(43, 101, 127, 149, 173, 192, 214, 240, 277, 332, 428, 1017),
        own=NONE,
        answer=ONE,
        spread=1.0,
        alike=NONE,
    ),
}


def choices(rounds: int) -> Iterator[Ratio]:
    """Items as long as each data set's, all by one model; without lm-eval its rows are ours."""
    torch.manual_seed(0)
    config = preset("transformer", "tiny", max_position_embeddings=1024)
    model = ClearheadForCausalLM(config).to(best_device()).eval()
    with evaluating(model):
        prefill = Prefill(model)
    for name, kind in KINDS.items():
        questions = _questions(kind, model.config.vocab_size)
        rows = [row for question in questions for row in question]

        ours = "contexts read once"
        shared = partial(_shared, model, prefill, questions)
        peer, theirs = _peer(model, rows)
        sides: dict[str, Callable[[], object]] = {f"{ours}, {TOKENS} tokens": shared, **theirs}
        seconds = take_turns(sides, rounds, unmeasured=1)
        yield faster_paths(f"choices, {name}", ours, peer, 1 / 1.5, seconds)


def _shared(
    model: ClearheadForCausalLM, prefill: Prefill, questions: list[list[Row]]
) -> list[list[float]]:
    return log_likelihoods(
        model, prefill, questions, batch_tokens=TOKENS, advanced=lambda _count: None
    )


def _questions(kind: Kind, vocabulary: int) -> list[list[Row]]:
    draw = np.random.default_rng(0)

    def at(share: float, values: Quantiles) -> float:
        return float(np.interp(share, PLACES, values))

    def ids(share: float, lengths: Quantiles) -> tuple[int, ...]:
        return tuple(draw.integers(0, vocabulary, round(at(share, lengths))).tolist())

    found = []
    for _ in range(QUESTIONS):
        start = ids(draw.random(), kind.shared)
        own, answer, alike = draw.random(3)
        shares = np.clip(answer + kind.spread * (draw.random(kind.choices) - 0.5), 0, 1)
        contexts = [start + ids(own, kind.own) for _ in shares]
        answers = [ids(share, kind.answer) for share in shares]
        same = round(at(alike, kind.alike) * min(map(len, answers)))
        answers = [answers[0][:same] + answer[same:] for answer in answers]
        found.append([Row(*pair) for pair in zip(contexts, answers, strict=True)])
    return found


def _peer(
    model: ClearheadForCausalLM, rows: list[Row]
) -> tuple[str, dict[str, Callable[[], object]]]:
    """The harness's own class on the same rows, or what it does, at each size of batches."""
    if find_spec("lm_eval") is None:
        name = "whole rows"
        return name, {f"{name}, {n} rows": partial(_whole_rows, model, rows, n) for n in ROWS}
    name = "lm-eval's HFLM"
    huggingface = require("lm_eval.models.huggingface", EXTRA)
    # It wants a tokenizer, and here nothing is tokenised.
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    asked = [(("", ""), list(row.context), list(row.continuation)) for row in rows]
    sides: dict[str, Callable[[], object]] = {}
    for count in ROWS:
        with quiet():
            harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=count)
        sides[f"{name}, {count} rows"] = partial(
            harness._loglikelihood_tokens, asked, disable_tqdm=True
        )
    return name, sides


def _whole_rows(model: ClearheadForCausalLM, rows: list[Row], batch: int) -> list[float]:
    """Padded on the right, the longest first; the logits of every token are made."""
    rows = sorted(rows, key=lambda row: len(row.context + row.continuation), reverse=True)
    scores = []
    with evaluating(model):
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            ids = [torch.tensor((row.context + row.continuation)[:-1]) for row in some]
            ids_BT = pad_sequence(ids, batch_first=True).to(model.device)
            logs_BTV = model(input_ids=ids_BT, use_cache=False).logits.float().log_softmax(-1)
            for logs_TV, row in zip(logs_BTV, some, strict=True):
                target_N1 = torch.tensor(row.continuation, device=model.device)[:, None]
                first = len(row.context) - 1
                picked_N1 = logs_TV[first : first + len(target_N1)].gather(1, target_N1)
                scores.append(float(picked_N1.sum()))
    return scores
