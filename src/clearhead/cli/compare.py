"""Train presets, in every combination of the varied settings, on the same tokens in the same order.
Measure them alike, print a table, and write records and a page.

examples:
  clearhead compare transformer softmax1 --seeds 0 1 2 --data.data my/texts --output runs/mine
  clearhead compare transformer --vary train.optimizer=adamw,orthoadam --measure-every 0.05
  clearhead compare transformer gated differential-v2 --from ./SmolLM2-135M --data.data my/texts
"""

from dataclasses import dataclass
from pathlib import Path

from clearhead.cli.options import given
from clearhead.lab.configs import RECORDS, ArmConfig, CompareConfig, continued_recipe


@dataclass(frozen=True, kw_only=True)
class Command(CompareConfig):
    """A comparison and its report."""

    beside: tuple[Path, ...] = ()
    """Earlier records to show on the page, each under its own label."""


def default(words: list[str]) -> Command | None:
    """The defaults of a comparison that starts from a trained model."""
    return Command(train=continued_recipe(ArmConfig)) if given(words, "--from") else None


def run(command: Command) -> int:
    from clearhead.cli.publishing import publish
    from clearhead.lab.compare import compare
    from clearhead.progress import Line
    from clearhead.report import load, page_of

    load(command.beside)  # a file that cannot be read is better known before the training
    with Line() as work:
        compare(command, work=work)
    records = load([command.output / RECORDS, *command.beside])
    return publish(page_of(records), command.output / "report.html")
