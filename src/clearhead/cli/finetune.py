"""clearhead finetune: a checkpoint on a task of classification."""

from dataclasses import dataclass

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.experiments.configs import RECORDS, FinetuneJob
from clearhead.metavars import Model
from clearhead.terminal import console, say


@dataclass(frozen=True, kw_only=True)
class Command(FinetuneJob):
    """A fine-tuning."""

    model: Positional[Model]
    """A checkpoint's folder (RUN/final), or a hub name: causal, masked, or any encoder."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="finetune",
        description="Fine-tune a checkpoint on a GLUE task or on labelled texts of your own; "
        "OUTPUT/seed0 is then an ordinary Hugging Face classifier.",
        examples=(
            "runs/bert/final --task wnli --output runs/wnli",
            "MODEL --train-file train.jsonl --validation-file test.jsonl --seeds 0 1 2",
        ),
    )
    from clearhead.experiments.finetune import run_finetune
    from clearhead.progress import Line
    from clearhead.report import page_of, to_console
    from clearhead.train import InterruptedRun

    try:
        with Line(unit="seed") as work:
            records = run_finetune(command, say=say, work=work)
    except InterruptedRun as stop:
        say("stopped and saved: the same command goes on from here")
        return stop.code
    for part in to_console(page_of(records)):
        console().print(part)
    say(f"models: {command.output}/seed…; records: {command.output / RECORDS}")
    return 0
