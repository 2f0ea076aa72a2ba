"""Fine-tune a checkpoint on a GLUE task, on Banking-77 or on labelled texts of your own;
OUTPUT/seed0/final is then an ordinary Hugging Face classifier.

examples:
  clearhead finetune runs/bert/final --task wnli --output runs/wnli
  clearhead finetune MODEL --train-file train.jsonl --validation-file test.jsonl --seeds 0 1 2
"""

from clearhead.lab.configs import RECORDS
from clearhead.lab.configs import FinetuneJob as Command
from clearhead.terminal import say


def run(command: Command) -> int:
    from clearhead.cli.publishing import publish
    from clearhead.lab.finetune import run_finetune
    from clearhead.progress import Line
    from clearhead.report import page_of

    with Line(unit="seed") as work:
        records = run_finetune(command, work=work)
    publish(page_of(records))
    say(f"models: {command.output}/seed…/final; records: {command.output / RECORDS}")
    return 0
