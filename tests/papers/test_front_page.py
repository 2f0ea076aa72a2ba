"""What README and docs/claims.md take from the records is what the book says."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "tools/front_page.py"))


@pytest.mark.parametrize(("page", "part"), [("README.md", "table"), ("docs/claims.md", "summary")])
def test_a_page_has_what_the_book_says(page, part):
    (block,) = MADE["BLOCK"].findall(ROOT.joinpath(page).read_text("utf-8"))
    assert block == MADE[part]()
    assert block in ROOT.joinpath("results/comparisons.md").read_text("utf-8")


def test_the_figure_is_that_of_the_records():
    assert MADE["FIGURE"].read_text("utf-8") == MADE["drawing"]()
