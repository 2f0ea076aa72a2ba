"""clearhead report: records to a table and a page."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to read and where to write."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl; or of diagnoses; or of
    what few bits cost."""
    output: Path = Path("report.html")
    """The page."""
    title: str = ""
    """Its title; unless given, the models' names."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="report",
        description="Read records, print the comparison and write one page that opens offline.",
    )
    from clearhead.cli.publishing import publish

    publish(command.records, command.output, title=command.title)
    return 0
