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
Deciles = tuple[int, ...]


class Kind(NamedTuple):
    """Lengths of a data set's items in tokens of a vocabulary of 4,096: least, deciles, most.

    shared: what a question's contexts start with. own: the rest of each context. answer: what is
    scored. spread: how far the answers of a question are apart, in shares of the distribution.
    """

    choices: int
    shared: Deciles
    own: Deciles
    answer: Deciles
    spread: float


# Of the first 1,200 items of each; an answer of ARC, PIQA and BoolQ follows "Question: … Answer:".
KINDS = {
    "HellaSwag": Kind(
        4,
        (15, 25, 31, 35, 38, 41, 44, 48, 54, 60, 99),
        (0,),
        (4, 10, 12, 14, 15, 17, 20, 22, 26, 32, 113),
        0.25,
    ),
    "ARC": Kind(
        4,
        (16, 24, 27, 30, 33, 38, 44, 53, 63, 78, 165),
        (0,),
        (1, 3, 4, 5, 6, 7, 8, 10, 13, 16, 36),
        0.2,
    ),
    "PIQA": Kind(
        2,
        (9, 13, 16, 18, 19, 20, 22, 23, 25, 29, 46),
        (0,),
        (2, 8, 11, 14, 18, 23, 29, 37, 49, 77, 377),
        0.05,
    ),
    "WinoGrande": Kind(
        2,
        (1, 17, 19, 20, 22, 23, 24, 26, 28, 31, 45),
        (1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 9),
        (2, 4, 4, 5, 6, 7, 8, 10, 11, 13, 33),
        0.0,
    ),
    "BoolQ": Kind(2, (42, 110, 141, 166, 190, 215, 236, 271, 310, 375, 1023), (0,), (1, 2), 1.0),
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

    def ids(deciles: Deciles, share: float) -> tuple[int, ...]:
        size = round(float(np.quantile(deciles, share)))
        return tuple(draw.integers(0, vocabulary, size).tolist())

    found = []
    for _ in range(QUESTIONS):
        start = ids(kind.shared, draw.random())
        own, answer = draw.random(2)
        shares = np.clip(answer + kind.spread * (draw.random(kind.choices) - 0.5), 0, 1)
        found.append([Row(start + ids(kind.own, own), ids(kind.answer, s)) for s in shares])
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
