"""Simplified blocks in the crammed BERT: arXiv 2311.01906, tables 1 and 2.

Hidden tokens, then GLUE from every pretrained seed, with that seed. `paper` is appendix D.2 on the
nearest text to be had; it gives no rate for the baseline, whose 1e-3 is arXiv 2212.14034's.
"""

from collections.abc import Callable, Iterator

from clearhead.data import DataConfig
from clearhead.experiments.finetune import RECORDS
from clearhead.experiments.reproduce.runner import Command
from clearhead.experiments.reproduce.study import Arm, Series, Study

CRAMMED = (
    *("--train.sequence-length", "128", "--train.schedule", "triangle", "--train.warmup", "0.75"),
    *("--train.final-learning-rate", "0", "--train.betas", "0.9", "0.98", "--train.clip", "0.5"),
    *("--train.epsilon", "1e-12", "--train.log-every", "20", "--lengths", "1"),
)
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
RATES = ("1e-3", "2e-3", "4e-3")


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


def _study(tokens: int, sweep: int, wikitext: str, *tasks: str) -> Study:
    return Study(
        name="encoders",
        arms=tuple(Arm(preset, RATES) for preset in ("bert", "bert-sas", "bert-sas-p")),
        tokens=tokens,
        sweep_tokens=sweep,
        options=(*CRAMMED, "--train.batch-size", "64"),
        text=DataConfig(data=(f"hf:Salesforce/wikitext:{wikitext}",)),
        questions=_glue(*tasks, rate="1e-3"),
    )


SCALES = {
    "tiny": (_study(2_000_000, 600_000, "wikitext-2-raw-v1", "rte"),),
    "small": (_study(20_000_000, 5_000_000, "wikitext-103-raw-v1", "rte", "mrpc", "cola", "qnli"),),
    "paper": (
        Study(
            name="encoders",
            arms=(Arm("bert", ("1e-3",)), Arm("bert-sas", ("3e-3",)), Arm("bert-sas-p", ("3e-3",))),
            tokens=5_000_000_000,
            options=(
                *(*CRAMMED, "--size", "crammed", "--train.batch-size", "64"),
                *("--train.accumulation", "128", "--train.ramp", "0.6"),
                *("--train.compile", "blocks", "--train.save-every", "200"),
            ),
            text=DataConfig(data=("hf:monology/pile-uncopyrighted",), vocabulary=32_768),
            questions=_glue(*GLUE, rate="1.5e-4"),
        ),
    ),
}
