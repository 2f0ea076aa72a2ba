"""Tasks with a known chance: shown beside each row; the size at which the baseline solves them."""

from pathlib import Path

from clearhead.report import append, load, page_of
from clearhead.report.evaluation import solved

from .conftest import printed, shown


def _write(path: Path, label: str, parameters: int, accuracy: dict[int, float]) -> None:
    for arm, shift in (("sas-p", 0.05), ("transformer", 0.0)):
        for seed in (0, 1):
            run = {"run": f"{label}/{arm}/{seed}"}
            head = {"arm": arm, "preset": arm, "seed": seed, "label": label}
            append(path, {"kind": "run", **run, **head, "parameters": parameters})
            for hops, right in accuracy.items():
                line = {"kind": "measure", **run, "task": "depo", "vertices": 8, "hops": hops}
                line["scaling"] = "none"
                append(path, {**line, "metric": "accuracy", "value": right + shift})
                append(path, {**line, "metric": "chance", "value": 0.125, "aside": True})


def test_the_page_says_from_which_size_the_baseline_solves_a_task(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    _write(path, "width 256", 3_000_000, {1: 0.95, 2: 0.91, 4: 0.86})
    _write(path, "width 128", 1_000_000, {1: 0.93, 2: 0.5, 4: 0.2})
    records = load(path)
    said = solved(records, "depo")
    assert said == (
        "Solved (90.0\u00a0% right): transformer · none, vertices 8, hops 1 from 1.00\u00a0M "
        "parameters, transformer · none, vertices 8, hops 2 from 3.00\u00a0M parameters and "
        "transformer · none, vertices 8, hops 4 at no size."
    )
    page = page_of(records)
    assert "hops 2 from 3.00" in shown(page)
    assert "vertices 8, hops 4 (chance 12.5\u00a0%)" in printed(page, width=200)
    assert "chance" not in [block.title for block in page.blocks() if hasattr(block, "title")]


def test_one_size_alone_says_nothing_of_sizes(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    _write(path, "", 1_000_000, {1: 0.95})
    assert solved(load(path), "depo") == ""
    assert "chance 12.5" in printed(page_of(load(path)), width=200)
