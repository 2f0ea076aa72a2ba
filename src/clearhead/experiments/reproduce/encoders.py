"""Simplified blocks in the crammed BERT: arXiv 2311.01906, tables 1 and 2.

Hidden tokens, then GLUE from every pretrained seed, with that seed. `paper` is appendix D.2 on the
nearest text to be had; it gives no rate for the baseline, whose 1e-3 is arXiv 2212.14034's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from clearhead.data import DataConfig
from clearhead.experiments.finetune import RECORDS
from clearhead.experiments.reproduce.runner import Command
from clearhead.experiments.reproduce.study import Arm, Series, Study

# Weight decay stays at 0.1, which is SAS's.
CRAMMED = (
    *("--train.sequence-length", "128", "--train.schedule", "triangle", "--train.warmup", "0.75"),
    *("--train.final-learning-rate", "0", "--train.betas", "0.9", "0.98", "--train.clip", "0.5"),
    *("--train.epsilon", "1e-12", "--train.log-every", "20", "--lengths", "1"),
)
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")


def _glue(*tasks: str, rate: str) -> Callable[[Series, int], Iterator[Command]]:
    def questions(series: Series, seed: int) -> Iterator[Command]:
        for task in tasks:
            folder = series.evaluated(seed) / task
            yield series.ask(
                *(seed, task, "finetune", "--task", task, "--train.learning-rate", rate),
                *("--seeds", str(seed), "--output", str(folder)),
                records=folder / RECORDS,
                on=f" on {task}",
            )

    return questions


def _arms(*rates: str) -> tuple[Arm, ...]:
    return tuple(Arm(preset, rates) for preset in ("bert", "bert-sas", "bert-sas-p"))


TINY = Study(
    name="encoders",
    arms=_arms("1e-3", "2e-3", "4e-3"),
    tokens=2_000_000,
    sweep_tokens=600_000,
    options=(*CRAMMED, "--train.batch-size", "64"),
    text=DataConfig(data=("hf:Salesforce/wikitext:wikitext-2-raw-v1",)),
    questions=_glue("rte", rate="1e-3"),
)
SMALL = replace(
    TINY,
    tokens=20_000_000,
    sweep_tokens=5_000_000,
    text=DataConfig(data=("hf:Salesforce/wikitext:wikitext-103-raw-v1",)),
    questions=_glue("rte", "mrpc", "cola", "qnli", rate="1e-3"),
)
PAPER = replace(
    TINY,
    arms=(Arm("bert", ("1e-3",)), *_arms("3e-3")[1:]),
    tokens=5_000_000_000,
    options=(
        *(*CRAMMED, "--size", "crammed", "--train.batch-size", "64", "--train.accumulation", "128"),
        *("--train.ramp", "0.6", "--train.compile", "blocks", "--train.save-every", "200"),
    ),
    text=DataConfig(data=("hf:monology/pile-uncopyrighted",), vocabulary=32_768),
    questions=_glue(*GLUE, rate="1.5e-4"),
)
SCALES = {"tiny": (TINY,), "small": (SMALL,), "paper": (PAPER,)}
