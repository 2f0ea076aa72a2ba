"""Read records, print a table and a verdict, and write a page that opens offline.

examples:
  clearhead report runs/mine/records.jsonl
  clearhead report results/passkey.jsonl results/tiny-long.jsonl --output both.html
"""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.metavars import Text


@dataclass(frozen=True, kw_only=True)
class Command:
    """Records to show, and the page."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl: of runs, diagnoses and
    quantisations, alone or together."""
    output: Path = Path("report.html")
    """File for the page."""
    title: Text = ""
    """Title of the page; the models' names unless given."""


def run(command: Command) -> int:
    from clearhead.cli.publishing import publish
    from clearhead.report import load, page_of

    return publish(page_of(load(command.records), command.title), command.output)
