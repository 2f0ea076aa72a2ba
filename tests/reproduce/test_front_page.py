"""README's first screen is what its command makes of the records."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "tools/front_page.py"))


def test_the_table_is_that_of_the_claims():
    (block,) = MADE["BLOCK"].findall(ROOT.joinpath("README.md").read_text("utf-8"))
    assert block == MADE["table"]()


def test_the_figure_is_that_of_the_records():
    assert MADE["FIGURE"].read_text("utf-8") == MADE["drawing"]()
