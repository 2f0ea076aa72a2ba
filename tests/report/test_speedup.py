"""Effective speed-up of arms whose curves are known."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.report import append, load, page_of
from clearhead.report.speedup import speedup_section
from clearhead.report.statistics import Verdict

from .conftest import shown

STEPS, TOKENS = 20, 100
Law = Callable[[float], float]


def _base(cost: float) -> float:
    return 2.0 + 3.0 * cost**-0.3


def write(
    path: Path,
    arm: str,
    law: Law,
    label: str = "",
    steps: int = STEPS,
    parameters: int = 4096,
    seconds: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> None:
    """Three seeds of an arm whose loss is a law of its tokens, and their seconds a step."""
    for seed, (noise, second) in enumerate(zip((-1e-3, 0.0, 1e-3), seconds, strict=True)):
        run = {"run": f"{label}/{arm}/seed{seed}"}
        header = {"arm": arm, "preset": arm, "seed": seed, "label": label, "forward_flops": 1.0}
        header |= {"train": {"sequence_length": 8}, "non_embedding_parameters": parameters}
        lines = [{"kind": "run", **run, **header}]
        for step in range(1, steps + 1):
            counted = {"step": step, "tokens": step * TOKENS}
            lines.append({"kind": "step", **run, **counted, "seconds": step * second, "loss": 9.0})
            loss = law(step * TOKENS) * (1 + noise)
            line = {"kind": "measure", **run, "metric": "loss", "length": 8, "value": loss}
            lines.append({**line, "step": step})
        append(path, *lines, *([line] if steps else []))


def cells(path: Path) -> dict[tuple[str, str, str], object]:
    section = speedup_section(load(path))
    assert section is not None
    table = section.blocks[0]
    return {
        (row.title, column.group.removeprefix("Speed-up in "), column.title): cell[0]
        for row, some in zip(table.rows, table.cells, strict=True)
        for column, cell in zip(table.columns, some, strict=True)
        if cell
    }


def test_a_slower_arm_is_where_the_baseline_was_earlier(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, "transformer", _base)
    write(path, "half", lambda cost: _base(cost / 2))
    found = cells(path)
    assert set(found) == {("at this size", cost, "in the run") for cost in ("FLOPs", "wall-clock")}
    for entry in found.values():
        value, low, high = _numbers(entry.text)
        assert value == pytest.approx(0.5, abs=0.01)
        assert low < value < high
        assert entry.difference.mean == pytest.approx(-0.5, abs=0.01)
        assert entry.difference.verdict is Verdict.LOWER
        assert entry.difference.p < 1e-3


def test_what_the_baseline_never_reaches_is_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, "transformer", _base)
    write(path, "twice", lambda cost: _base(2 * cost))
    write(path, "awful", lambda cost: _base(cost / 1000))
    section = speedup_section(load(path))
    better, worse = (row[0][0] for row in section.blocks[0].cells)
    assert (better.text, better.note) == ("≥ 1.00 ×", "never reached")
    assert worse.text == "≤ 0.0500 ×"
    assert better.difference is None
    assert worse.note == "reached before the first measurement"


def test_a_run_that_diverged_is_no_short_run(tmp_path: Path) -> None:
    path, whole = tmp_path / "records.jsonl", tmp_path / "whole.jsonl"
    for one in (path, whole):
        write(one, "transformer", _base)
        write(one, "half", lambda cost: _base(cost / 2))
    run = {"run": "/half/seed3"}
    header = {"arm": "half", "preset": "half", "seed": 3, "label": "", "forward_flops": 1.0}
    train = {"train": {"sequence_length": 8}, "non_embedding_parameters": 4096}
    append(path, {"kind": "run", **run, **header, **train, "diverged": "loss was nan"})
    line = {"kind": "measure", **run, "metric": "loss", "length": 8}
    for step in (1, 2):
        append(path, {"kind": "step", **run, "step": step, "tokens": step * TOKENS, "seconds": 1.0})
        append(path, {**line, "value": 9.0, "step": step})
    assert cells(path) == cells(whole)


def test_losses_that_seeds_cannot_tell_apart_give_no_bound(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, "transformer", _base)
    write(path, "like it", lambda cost: _base(cost) - 1e-6)
    section = speedup_section(load(path))
    (row, *_) = section.blocks[0].cells
    assert row[0][0].text == "undecided"
    assert re.search(r"less than seeds decide: ±0\.\d+$", row[0][0].note)


def test_without_losses_on_the_way_there_is_no_section(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, "transformer", _base, steps=0)
    write(path, "other", _base, steps=0)
    assert speedup_section(load(path)) is None


def write_ladder(path: Path, seconds: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Path:
    """Three sizes of an arm that is worth twice its cost."""
    for size, steps in zip((64, 128, 256), (5, 20, 80), strict=True):
        place = {"label": f"width {size}", "steps": steps, "parameters": size**2}
        write(path, "transformer", _base, seconds=seconds, **place)
        write(path, "twice", lambda cost: _base(2 * cost), seconds=seconds, **place)
    return path


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    return write_ladder(tmp_path / "records.jsonl")


def test_over_a_ladder_the_fit_says_what_no_run_reached(ladder: Path) -> None:
    found = cells(ladder)
    last = "projected to 10 × the largest cost"
    for title in ("at width 64", "at width 128", "at width 256", last):
        for cost in ("FLOPs", "wall-clock"):
            entry = found[title, cost, "by the fit"]
            value, low, high = _numbers(entry.text)
            assert value == pytest.approx(2.0, rel=0.05)
            assert low < 2 < high
            extrapolated = title in ("at width 256", last)
            assert entry.note == ("extrapolated" if extrapolated else "")
    assert (last, "FLOPs", "in the run") not in found


def test_clocks_that_differ_between_seeds_widen_the_interval_of_wall_clock(tmp_path: Path) -> None:
    even, uneven = (
        cells(write_ladder(tmp_path / name, seconds))
        for name, seconds in (("even", (1.0, 1.0, 1.0)), ("uneven", (1.0, 2.0, 1.5)))
    )
    place = "at width 128", "wall-clock", "by the fit"
    widths = [
        high / low for _, low, high in (_numbers(found[place].text) for found in (even, uneven))
    ]
    assert widths[1] > 1.3 * widths[0]
    flops = "at width 128", "FLOPs", "by the fit"
    assert even[flops].text == uneven[flops].text


@pytest.mark.parametrize(
    "change",
    [
        ('"non_embedding_parameters": 16384', '"non_embedding_parameters": 4096'),
        ('"label": "width 128"', '"label": "width 128", "objective": "mlm"'),
        ('"label": "width 128"', '"label": "width 128", "data": {"fingerprint": "another"}'),
    ],
    ids=["two sizes alone", "another objective", "another text"],
)
def test_no_law_is_fitted_to_what_is_no_ladder(ladder: Path, change: tuple[str, str]) -> None:
    ladder.write_text(ladder.read_text().replace(*change))
    assert not any(column == "by the fit" for _, _, column in cells(ladder))


def test_a_ladder_that_is_no_power_law_says_so(ladder: Path) -> None:
    lines = ladder.read_text().replace('"value": 2.4', '"value": 4.4')
    ladder.write_text(lines)
    section = speedup_section(load(ladder))
    assert section is not None
    notes = section.blocks[1].texts
    assert any("misses a size’s mean loss by up to" in note for note in notes)
    assert any("too far for its numbers to be used" in note for note in notes)
    entry = cells(ladder)["projected to 10 × the largest cost", "FLOPs", "by the fit"]
    assert "over 100" in entry.text or "under 0.01" in entry.text
    assert len(entry.text) < 40
    assert entry.note == "poor fit"


def test_the_page_shows_it(ladder: Path) -> None:
    page = page_of(load(ladder))
    assert "extrapolated" in shown(page)
    assert "twice over transformer, FLOPs: E 2.0" in shown(page)


def _numbers(text: str) -> tuple[float, float, float]:
    value, _, interval = text.partition(" × ")
    low, high = interval.strip("[]").split(", ")
    return float(value), float(low), float(high)
