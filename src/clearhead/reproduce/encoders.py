"""Simplified blocks in the crammed BERT: arXiv 2311.01906, tables 1 and 2.

Hidden tokens, then classification from every pretrained seed, with that seed: GLUE, and but for
`paper` Banking-77, since models of this size guess at GLUE. Every arm is fine-tuned at one rate.
`paper` is appendix D.2 on the nearest text to be had; it gives no rate for the baseline, whose 1e-3
is arXiv 2212.14034's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.data import DataConfig
from clearhead.experiments.configs import FinetuneJob
from clearhead.reproduce.recipes import RUNS
from clearhead.reproduce.study import TRAINED, Study
from clearhead.train import FinetuneConfig

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
RATES = (1e-3, 2e-3, 4e-3)
SHARED: dict[str, Any] = {"presets": ("bert",), "seeds": (0, 1, 2), "label": "encoders"}


def encoders(scale: str) -> Iterator[Study]:
    """The crammed BERT, and its blocks simplified."""
    table = {"tiny": _tiny, "small": _small, "paper": _paper}[scale]()
    baseline, simplified = ((1e-3,), (3e-3,)) if scale == "paper" else (RATES, RATES)
    yield table.arm("bert", *baseline)
    yield table.arm("bert-sas", *simplified)  # the interventions: neither skips nor values,
    yield table.arm("bert-sas-p", *simplified)  # and both halves of a block side by side
    if scale != "paper":  # of CoCA: its authors train no encoder
        table = replace(table, questions={})
        yield table.arm("bert", *baseline, position="rope")
        yield table.arm("bert", *baseline, position="rope", scores="coca")


def _tiny() -> Study:
    return _short(
        2_000_000,
        "wikitext-2-raw-v1",
        sweep_tokens=600_000,
        questions={
            **_tasks("rte", rate=1e-3),
            **_tasks("banking77", rate=1e-3, epochs=2),  # 626 steps; five epochs take a core 8 min
        },
    )


def _small() -> Study:
    return _short(
        20_000_000,
        "wikitext-103-raw-v1",
        sweep_tokens=5_000_000,
        questions=_tasks("rte", "mrpc", "cola", "qnli", "banking77", rate=1e-3),
    )


def _paper() -> Study:
    return RUNS["crammed"].study(**SHARED, questions=_tasks(*GLUE, rate=1.5e-4))


def _short(tokens: int, text: str, **others: Any) -> Study:
    """The crammed recipe in steps of one batch."""
    whole: dict[str, Any] = {"accumulation": 1, "ramp": 0.0, "compile": "none", "save_every": 0}
    train = replace(RUNS["crammed"].config.train, tokens=tokens, **whole)
    data = DataConfig(data=(f"hf:Salesforce/wikitext:{text}",))
    return Study(**SHARED, train=train, data=data, **others)


def _tasks(*tasks: str, rate: float, epochs: int = 5) -> Mapping[str, FinetuneJob]:
    train = FinetuneConfig(learning_rate=rate, epochs=epochs)
    return {task: FinetuneJob(model=TRAINED, task=task, train=train) for task in tasks}
