"""A whole passkey sweep against its promise; sliding windows against their forward passes."""

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.race import Ratio, ratio_of
from benchmarks.timing import take_turns
from clearhead.data import Corpus, synthetic
from clearhead.data.tokenizer import train
from clearhead.errors import ClearheadError
from clearhead.eval.retrieval import PasskeyTask
from clearhead.eval.sliding import sliding, windows_of
from clearhead.measure.sweep import Subject, Texts
from clearhead.models import ClearheadForCausalLM, preset
from clearhead.models.inspection import evaluating
from clearhead.models.loading import best_device

LENGTHS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096)
SECONDS = 180.0  # promised for 20 trials at each length on two cores
TRIALS = 4  # at each of five depths
TOKENS, WINDOW, STRIDE = 8192, 512, 128


def passkey(rounds: int) -> Iterator[Ratio]:
    """A sweep of 8 lengths to 4,096, 20 trials each, of a model of 3 million parameters, once."""
    tokenizer = train(synthetic.texts("synthetic:passkey:documents=2000"), 4096)
    subject = Subject(
        model=_model(),
        tokenizer=tokenizer,
        texts=Texts(_no_text, ()),
        lengths=LENGTHS,
        tokens=0,
        batch_tokens=8192,
        seed=0,
    )
    task = PasskeyTask(trials=TRIALS)
    started = time.perf_counter()
    for cell in task.cells(subject):
        task.measure(subject, cell)
    took = time.perf_counter() - started
    yield Ratio(
        name="passkey",
        ours=f"{len(LENGTHS)} lengths to {LENGTHS[-1]}, {5 * TRIALS} trials each, seconds",
        peer=f"{SECONDS:g} s",
        ratio=took / SECONDS,
        bound=1.0,
        seconds={"passkey": [took]},
    )


def sliding_windows(rounds: int) -> Iterator[Ratio]:
    """Losses by windows that overlap, against one plain forward pass of each window."""
    model = _model()
    document = np.random.default_rng(0).integers(0, model.config.vocab_size, TOKENS)
    ids_NT = torch.stack(
        [
            torch.from_numpy(document[start:stop])
            for start, stop, _ in windows_of(TOKENS, WINDOW, STRIDE)
            if stop - start == WINDOW
        ]
    ).to(model.device)
    rows = 8

    def forwards() -> None:
        with evaluating(model):
            for ids_BT in ids_NT.split(rows):
                model(input_ids=ids_BT, use_cache=False)

    def losses() -> None:
        for _ in sliding(
            model, [document], length=WINDOW, stride=STRIDE, batch_tokens=rows * WINDOW
        ):
            pass

    seconds = take_turns({"sliding losses": losses, "the windows' forwards": forwards}, rounds)
    yield ratio_of("sliding", "sliding losses", "the windows' forwards", 1.1, seconds)


def _model() -> ClearheadForCausalLM:
    torch.manual_seed(0)
    return ClearheadForCausalLM(preset("transformer", "tiny")).to(best_device()).eval()


def _no_text() -> Corpus:
    raise ClearheadError("passkey prompts need no text")
