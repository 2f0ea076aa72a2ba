"""Numbers that pages show of committed records, frozen in page-numbers.json.

`python tests/report/test_numbers.py` writes that file again.
"""

import json
from pathlib import Path

import pytest

from clearhead.records.loading import load
from clearhead.report import page_of
from clearhead.report.pivots import Pivot

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("page-numbers.json")
NAMES = (
    *("backcopy", "backcopy-diagnoses", "blocks-books", "encoders", "learned", "memory"),
    *("quantization", "repair", "retrofit-65k", "smollm2-diagnosis", "speed", "turned"),
    *("turned-abilities", "turned-passkeys"),
)


def numbers(name: str) -> dict[str, list[str]]:
    """The numbers in each section's tables, sorted: a table may be turned, not its numbers."""
    found = {}
    for section in page_of(load(ROOT / f"results/{name}.jsonl")).sections:
        texts = [
            entry.text
            for block in section.blocks
            if isinstance(block, Pivot)
            for row in block.cells
            for cell in row
            for entry in cell
        ]
        if texts:
            found[section.name] = sorted(texts)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_pages_show_the_frozen_numbers(name):
    assert numbers(name) == json.loads(FROZEN.read_text("utf-8"))[name]


if __name__ == "__main__":
    frozen = {name: numbers(name) for name in NAMES}
    lines = (
        f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in frozen.items()
    )
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
