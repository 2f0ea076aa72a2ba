"""Arms, and what was measured on the way, at equal loss."""

from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.records.jsonl import append
from clearhead.report import load, page_of, render, style
from clearhead.report.comparison import at_equal_loss
from clearhead.report.statistics import Verdict

from .conftest import own, shown

Fake = Callable[..., Path]


def write(path: Path, arm: str, curves: list[list[tuple[float, float]]]) -> None:
    """An arm's runs, a list of (loss, kurtosis of the first token) at steps 10, 20 … a seed."""
    preset, *changes = arm.split(" · ")
    for seed, curve in enumerate(curves):
        run = {"run": f"{arm}/seed{seed}"}
        header = {"arm": arm, "preset": preset, "seed": seed}
        header["changes"] = {"train.optimizer": changes[0]} if changes else {}
        append(path, {"kind": "run", **run, **header})
        for number, (loss, kurtosis) in enumerate(curve, start=1):
            line = {"kind": "measure", **run, "step": 10 * number}
            append(path, {**line, "metric": "loss", "value": loss, "length": 64})
            append(path, {**line, "metric": "kurtosis", "tokens": "first", "value": kurtosis})


ADAMW, ORTHOADAM = "transformer · adamw", "transformer · orthoadam"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """OrthoAdam ends at loss 3, where AdamW, which goes on to 2, was midway from 10 to 30."""
    path = tmp_path / "records.jsonl"
    write(path, ORTHOADAM, [[(5.0, 3.0), (4.0, 3.2), (3.0, 4.0 + seed)] for seed in range(3)])
    write(path, ADAMW, [[(5.0, 3.0), (4.0, 10.0), (2.0, 30.0)]] * 3)
    return path


def test_models_are_compared_where_they_are_equally_good(path):
    # The reference is the first arm of the baseline preset as recorded.
    records = load(path)
    assert records.arms() == [ORTHOADAM, ADAMW]
    table = at_equal_loss(records)
    assert [row.arm for row in table.rows] == [ADAMW]
    (loss,), (mine, theirs) = table.cells[0]
    assert theirs.name == ORTHOADAM
    assert [one.text for one in (loss, mine, theirs)] == ["3.00 ± 0", "20.0 ± 0", "5.0 ± 1.0"]
    assert mine.difference.verdict is Verdict.HIGHER
    assert "higher by 15" in shown(page_of(records))


def test_what_was_not_measured_before_and_after_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, "transformer", [[(5.0, 3.0), (4.0, 4.0)]])
    write(path, "softmax1", [[(3.0, 3.0), (2.0, 4.0)]])  # already better at its first
    table = at_equal_loss(load(path))
    assert [column.title for column in table.columns] == ["compared at"]
    write(path, "alone", [[]])
    assert len(at_equal_loss(load(path)).rows) == 1  # type: ignore[union-attr]


def test_many_arms_stay_apart(tmp_path):
    path = tmp_path / "r.jsonl"
    optimizers = ["adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon", "soap", "lion"]
    for preset in ("transformer", "softmax1"):
        for optimizer in optimizers:
            write(path, f"{preset} · {optimizer}", [[(5.0, 3.0), (4.0, 4.0)]])
            line = {"kind": "measure", "run": f"{preset} · {optimizer}/seed0", "value": 9.0}
            for length in (64, 128):
                append(path, {**line, "metric": "perplexity", "length": length})
    records = load(path)
    looks = style.looks(records.arms())
    assert len(looks) == 16
    assert len({(look.colour, look.symbol) for look in looks.values()}) == 16
    assert len({look.colour for look in list(looks.values())[:12]}) == 12
    assert all(style.LIGHT_TO_DARK[look.colour] == look.dark for look in looks.values())
    page = own(render(page_of(records)))
    key = page.split('<ul class="key">')[1].split("</ul>")[0]
    assert key.count("<li>") == 16
    assert "softmax1 · lion" in key
