"""docs/serving.md, which tests compare with what servers make of each preset."""

from pathlib import Path

TEXT = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text("utf-8")


def table() -> dict[str, list[str]]:
    """{preset: cells} of its table."""
    rows = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows if len(row) == 8}
