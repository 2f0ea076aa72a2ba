"""clearhead report: records to a table and a page."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from clearhead.cli.options import parse
from clearhead.errors import ClearheadError
from clearhead.metavars import Text
from clearhead.records import jsonl


@dataclass(frozen=True, kw_only=True)
class Command:
    """Records to show, and the page."""

    records: Positional[tuple[Path, ...]]
    """Files of records (JSON lines), such as runs/compare/records.jsonl. Records of runs, of
    diagnoses and of quantisations each have a page of their own."""
    output: Path = Path("report.html")
    """File for the page."""
    title: Text = "clearhead report"
    """Title of the page."""


def run(words: list[str]) -> int:
    command = parse(
        Command,
        words,
        verb="report",
        description="Read records, print their tables and write one page that opens offline.",
        examples=(
            "runs/mine/records.jsonl",
            "results/passkey.jsonl results/tiny-long.jsonl --output both.html",
        ),
    )
    from clearhead.cli.publishing import publish, publish_diagnosis, publish_quantization

    publishers = {"diagnosis": publish_diagnosis, "quantization": publish_quantization}
    kinds = {
        path: publishers.get(str((jsonl.first(path) or {}).get("kind")), publish)
        for path in command.records
    }
    if len(set(kinds.values())) > 1:
        raise ClearheadError(
            f"records of runs, of diagnoses and of quantisations do not share a page: "
            f"give each kind by itself; found {', '.join(map(str, kinds))}"
        )
    kinds[command.records[0]](command.records, command.output, title=command.title)
    return 0
