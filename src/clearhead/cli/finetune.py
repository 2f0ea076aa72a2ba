"""clearhead finetune: a checkpoint on a task of classification."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.experiments.configs import RECORDS, FinetuneJob
from clearhead.metavars import Model
from clearhead.terminal import console, say

if TYPE_CHECKING:
    from clearhead.report.records import Records


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
    from clearhead.experiments.finetune import InterruptedTask, run_finetune

    try:
        records = run_finetune(command, say=say)
    except InterruptedTask as stop:
        say("stopped; finished seeds are kept, the same command starts the others")
        return stop.code
    _print(records)
    say(f"models: {command.output}/seed…; records: {command.output / RECORDS}")
    return 0


def _print(records: "Records") -> None:
    from rich.markup import escape
    from rich.table import Table

    (name,) = records.arms()
    table = Table(title=escape(name))
    for heading in ("split", "metric", "mean", "standard deviation", "seeds"):
        table.add_column(heading)
    measured = dict.fromkeys(
        (line["metric"], line["split"])
        for line in records.runs[0].measures.values()
        if "split" in line
    )
    for metric, split in measured:
        found = records.summary(name, metric, split=split)
        shown = ("none", "")
        if found is not None:
            shown = (f"{found.mean:.4f}", "" if found.n < 2 else f"{found.deviation:.4f}")
        table.add_row(escape(split), metric, *shown, str(0 if found is None else found.n))
    console().print(table)
