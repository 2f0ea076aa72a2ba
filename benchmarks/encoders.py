"""The simplified blocks where their paper timed them: the crammed encoder's training step."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.blocks import Setting, built
from benchmarks.race import Ratio, faster_paths
from benchmarks.timing import take_turns
from benchmarks.training import optimizer_step
from clearhead.models import ClearheadForMaskedLM
from clearhead.models.language_models import IGNORED
from clearhead.models.loading import best_device
from clearhead.optim import build_optimizer
from clearhead.train import TrainConfig

BASELINE = "bert"
# The share of the tokens that are hidden, which alone are predicted.
HIDDEN = 0.25

# The crammed encoder at half its width, in three quarters of its layers; nothing was promised here.
CPU = Setting(
    size="crammed",
    changes={
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    batch=16,
    length=128,
    bounds={"bert-sas": None, "bert-sas-p": None},
)
# The paper's own, with its microbatch (arXiv 2311.01906, D.2): SAS 1.09, SAS-P 1.16 of Pre-LN's
# steps by its Table 1.
GPU = Setting(
    size="crammed",
    changes={},
    batch=64,
    length=128,
    bounds={"bert-sas": 1 / 1.08, "bert-sas-p": 1 / 1.15},
)


def encoders(rounds: int) -> Iterator[Ratio]:
    """Each block's seconds a training step over the pre-norm encoder's, by the faster path."""
    bounds = _setting().bounds
    names, paths = (BASELINE, *bounds), ("eager", "compiled")
    torch._dynamo.reset()
    sides = {f"{name}, {path}": _training(name, path) for name in names for path in paths}
    seconds = take_turns(sides, rounds)
    for name, bound in bounds.items():
        yield faster_paths("encoders, training step", name, BASELINE, bound, seconds)


def _setting() -> Setting:
    return GPU if best_device().type == "cuda" else CPU


def _training(name: str, path: str) -> Callable[[], None]:
    setting = _setting()
    model = built(ClearheadForMaskedLM, setting, name, path).train()
    optimizer = build_optimizer(model, TrainConfig(learning_rate=1e-4))
    shape = setting.batch, setting.length
    ids = torch.randint(0, model.config.vocab_size, shape, device=model.device)
    labels = torch.where(torch.rand(shape, device=model.device) < HIDDEN, ids, IGNORED)
    return optimizer_step(model, optimizer, ids, labels)
