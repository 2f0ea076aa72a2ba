"""The comparison table in both renderings."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from clearhead.report import append, comparison, load, style, tables
from clearhead.report.statistics import Verdict

Fake = Callable[..., Path]


def write(path: Path, preset: str, values: list[float], metric: str = "perplexity") -> None:
    for seed, value in enumerate(values):
        run = f"{preset}/seed{seed}"
        header = {"preset": preset, "seed": seed, "parameters": 1_900_000}
        append(path, {"kind": "run", "run": run, **header})
        append(path, {"kind": "measure", "run": run, "metric": metric, "value": value, "length": 8})


def console(path: Path, width: int = 100, threshold: float = 0.05) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(tables.to_console(comparison(load(path)), threshold))
    return out.getvalue()


def html(path: Path, threshold: float = 0.05) -> str:
    records = load(path)
    return tables.to_html(comparison(records), style.looks(records.arms()), threshold)


def test_mean_spread_and_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, "transformer", [10.0, 12.0, 11.0])
    write(path, "differential", [7.0, 9.1, 7.9])
    write(path, "softmax1", [9.0, 12.5, 10.2])
    table = comparison(load(path))
    titles = [column.title for column in table.columns]
    assert titles == ["all", "8"]  # columns without data are left out
    cells = {row.arm: row.cells[1][0] for row in table.rows}
    assert cells["transformer"].text == "11.0 ± 1.0"
    assert cells["transformer"].difference is None
    assert cells["differential"].difference is not None
    assert cells["differential"].difference.verdict is Verdict.LOWER
    assert "95 % interval" in cells["differential"].detail
    # Means 8 and 11, variances 1.11 and 1: error² 2.11/3; t(3.99) 2.778: half the interval 2.33.
    assert cells["differential"].difference.decidable == pytest.approx(2.33, abs=0.01)
    # softmax1: variances 3.163 and 1, t(3.16) 3.09: half the interval 3.65.
    for text in (html(path), console(path)):
        assert "lower by 3.0" in text
        assert "alone" not in text
        assert "undecided (±3.7)" in text
        assert "p = 0.02" in html(path)
    assert "lower by 3.0, alone" in console(path, threshold=0.001)
    assert 'class="verdict decided"' in html(path)
    assert 'class="verdict decided"' not in html(path, threshold=0.001)
    assert [row.seeds for row in table.rows] == ["3 seeds"] * 3


def test_one_seed_is_always_undecided(fake: Fake) -> None:
    path = fake(steps=2, attention=False)
    for row in comparison(load(path)).rows[1:]:
        verdicts = {
            entry.difference.verdict
            for cell in row.cells
            for entry in cell
            if entry.difference is not None
        }
        assert verdicts == {Verdict.ONE_SEED}
    assert "one seed: undecided" in html(path)
    assert "1 seed" in console(path)


def test_each_map_of_differential_attention_is_named(fake: Fake) -> None:
    path = fake(steps=1, attention=False)
    table = comparison(load(path))
    index = [column.title for column in table.columns].index("argmax share")
    names = {row.arm: [entry.name for entry in row.cells[index]] for row in table.rows}
    assert names["differential"] == ["map 1", "map 2", "difference"]
    assert names["transformer"] == [""]
    null = [column.title for column in table.columns].index("mass on no token")
    assert [len(row.cells[null]) for row in table.rows] == [0, 0, 1]
    assert "chance 2.4" in table.columns[index].unit
    for text in (html(path), console(path, 140)):
        assert "map 1" in text
        assert "difference" in text


def test_a_value_that_cannot_be_is_explained(fake: Fake) -> None:
    path = fake(presets=("transformer", "gpt2"), steps=1, attention=False)
    assert "learned positions end at 256 tokens" in html(path)
    assert "learned" in console(path)


def test_text_of_records_is_no_markup(fake: Fake) -> None:
    path = fake(presets=("<img src=x onerror=alert(1)>", "[bold red]x[/]"), steps=1)
    assert "<img" not in html(path)
    assert "[bold red]x[/]" in console(path, 160)


def test_no_records_make_an_empty_table() -> None:
    table = comparison(load([]))
    assert table.rows == ()
    assert table.columns == ()


def test_numbers_read_well() -> None:
    assert [style.number(x) for x in (0, 41.234, 1234.5, 0.03124, -2.5)] == [
        *("0", "41.2", "1,234", "0.0312", "-2.50")
    ]
    assert style.number(1.234e12) == "1.23e+12"
    assert style.with_spread(41.234, 0.123) == "41.23 ± 0.12"
    assert style.with_spread(1234.5, 31.0) == "1,234 ± 31"
    assert style.with_spread(41.234, None) == "41.2"
    assert style.count(299_008) == "299\u00a0k"
    assert style.percent(0.0239) == "2.4\u00a0%"
    assert style.percent(0.65) == "65.0\u00a0%"
