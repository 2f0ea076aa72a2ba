"""Contrasts compare what all runs of both sides measured, whatever else some did."""

from collections.abc import Mapping
from typing import Any

import pytest

from clearhead.papers.claims import evidence
from clearhead.papers.contrasts import higher, number
from clearhead.records.loading import parse
from clearhead.records.runs import Records

CONTRAST = higher("", number("m"), "differential", "transformer")


def _parsed(found: Mapping[tuple[str, int], Mapping[int, float]], **line: Any) -> Records:
    """Records of {(arm, seed): {length: value}}."""
    lines: list[dict[str, Any]] = []
    for (arm, seed), by_length in found.items():
        run = f"{arm}/seed{seed}"
        lines.append({"kind": "run", "run": run, "arm": arm, "preset": arm, "seed": seed})
        one = {"kind": "measure", "run": run, "metric": "m", **line}
        lines += [{**one, "length": length, "value": v} for length, v in by_length.items()]
    return parse(lines)


def test_a_length_that_some_seeds_lack_counts_in_none():
    records = _parsed(
        {
            ("transformer", 0): {64: 0.1, 128: 0.9},
            ("transformer", 1): {64: 0.2},
            ("differential", 0): {64: 0.3, 256: 0.7},
            ("differential", 1): {64: 0.4, 256: 0.8},
        }
    )
    (outcome,) = CONTRAST.outcomes(evidence({"": records}))
    assert outcome.theirs.mean == pytest.approx(0.15)
    assert outcome.ours.mean == pytest.approx(0.35)


def test_without_a_length_that_all_share_there_is_no_comparison():
    runs = {("transformer", 0): {64: 0.1}, ("differential", 0): {128: 0.3}}
    assert not [*CONTRAST.outcomes(evidence({"": _parsed(runs)}))]


def test_a_main_effect_leaves_out_a_seed_that_lacks_one_of_its_arms():
    runs = {
        (f"{side} · {other}", seed): {64: value}
        for side in ("differential", "transformer")
        for seed in (0, 1)
        for other, value in (("rope", 0.2), ("alibi", 0.6))
    }
    del runs["differential · rope", 1]
    contrast = higher("", number("m"), "differential*", "transformer*")
    (outcome,) = contrast.outcomes(evidence({"": _parsed(runs)}))
    assert (outcome.ours.n, outcome.ours.mean) == (1, pytest.approx(0.4))
    assert (outcome.theirs.n, outcome.theirs.mean) == (2, pytest.approx(0.4))
