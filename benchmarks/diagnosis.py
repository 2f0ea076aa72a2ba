"""Cost of a whole diagnosis against the plain forward pass of the same model."""

import platform
from collections.abc import Iterator

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.race import Ratio, in_new_process, ratio_of
from benchmarks.timing import take_turns
from clearhead.diagnose import diagnose
from clearhead.models.loading import best_device

WINDOWS, LENGTH, BATCH = 64, 512, 8
LIMIT = 4 * 2**30


def diagnosis(rounds: int) -> Iterator[Ratio]:
    """A model of 124 M parameters, 64 sequences of 512 tokens: time, and the memory of it all.

    Each round takes minutes on a CPU; after one unmeasured call a side, which warms it up on one
    batch, three rounds are enough.
    """
    model, windows = _model(), _windows()

    def plain(count: int = WINDOWS) -> None:
        with torch.no_grad():
            for batch in torch.stack(windows[:count]).split(BATCH):
                model(input_ids=batch.to(model.device), use_cache=False)

    def whole(count: int = WINDOWS) -> None:
        diagnose(model, windows[:count], batch_size=BATCH)

    plain(BATCH)
    whole(BATCH)
    sides = {"plain forward": plain, "diagnose": whole}
    seconds = take_turns(sides, min(rounds, 3), unmeasured=0)
    yield ratio_of("diagnose", "diagnose", "plain forward", 3.0, seconds)
    yield Ratio(
        name="diagnose, memory",
        ours="diagnose, bytes at the peak",
        peer="4 GiB",
        ratio=in_new_process("diagnosis.peak") / LIMIT,
        bound=1.0,
        seconds={},
    )


def peak() -> int:
    """Bytes at the high-water mark of a process that diagnoses, all that it loads included."""
    import resource

    diagnose(_model(), _windows()[: 2 * BATCH], batch_size=BATCH)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval().to(best_device())


def _windows() -> list[torch.Tensor]:
    return list(torch.randint(0, 50_257, (WINDOWS, LENGTH)))
