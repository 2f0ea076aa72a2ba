"""The claims: what each compares, and the verdicts on records that are known."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clearhead.lab.configs import Job
from clearhead.papers import book, stages
from clearhead.papers.claims import CLAIMS, pool, threshold_over, verdict_of
from clearhead.papers.contrasts import LOSS, Contrast, Gate, Judgement, higher, lower, number, ratio
from clearhead.papers.requests import EXPERIMENTS
from clearhead.records.jsonl import append
from clearhead.records.loading import load
from clearhead.records.runs import Records
from clearhead.report.pivots import models

from .making import near, of_losses, outcomes, recorded, verdict

BASE = [2.5, 2.51, 2.49]


def _contrast(claimed: str, margin: float | None = None, arm: str = "sas") -> Contrast:
    sides = {"ours": LOSS.of(arm), "theirs": LOSS.of("transformer")}
    return Contrast(**sides, claimed=claimed, words="", margin=margin)


def _only(contrast: Contrast, records: Records) -> Any:
    """The only outcome of a contrast in records."""
    (outcome,) = contrast.outcomes({"a": records})
    return outcome


def _reached(arm: str, least: float) -> tuple[Gate]:
    return (Gate(LOSS.of(arm), least, arm),)


@pytest.mark.parametrize(
    ("claimed", "margin", "values", "expected"),
    [
        ("lower", None, [2.0, 2.01, 1.99], Judgement.HOLDS),
        ("higher", None, [2.0, 2.01, 1.99], Judgement.DOES_NOT_HOLD),
        ("lower", None, [2.4, 2.6, 2.55], Judgement.UNDECIDED),
        ("lower", None, [2.0], Judgement.UNDECIDED),  # a seed has no spread
        ("lower", 0.1, [2.5, 2.51, 2.52], Judgement.HOLDS),
        ("lower", 0.001, [2.5, 2.51, 2.52], Judgement.UNDECIDED),
        ("lower", 0.1, [3.0, 3.01, 3.02], Judgement.DOES_NOT_HOLD),
        ("lower", 0.1, [2.61, 2.62, 2.6], Judgement.UNDECIDED),  # higher; by how much?
        ("higher", 0.1, [2.39, 2.4, 2.38], Judgement.UNDECIDED),
        ("higher", 0.1, [2.0, 2.01, 2.02], Judgement.DOES_NOT_HOLD),
    ],
)
def test_a_contrast_is_judged_by_its_interval_and_margin(claimed, margin, values, expected):
    outcome = _only(_contrast(claimed, margin), of_losses({"transformer": BASE, "sas": values}))
    assert outcome.ours.mean == pytest.approx(sum(values) / len(values))
    assert verdict(outcome) is expected
    # Among many comparisons: within a margin, too.
    assert verdict(outcome, threshold=0.0) is Judgement.UNDECIDED


@pytest.mark.parametrize(
    ("claimed", "margin", "value", "expected"),
    [
        ("lower", -0.5, 1.0, Judgement.HOLDS),  # at most half
        ("lower", -0.5, 1.001, Judgement.DOES_NOT_HOLD),
        ("higher", 0.1, 1.8, Judgement.HOLDS),
        ("lower", None, 2.0, Judgement.DOES_NOT_HOLD),
        ("higher", None, 2.1, Judgement.HOLDS),
    ],
)
def test_a_counted_number_needs_no_seeds(claimed, margin, value, expected):
    """Whatever the threshold: there is no chance in it."""
    counted = replace(_contrast(claimed, margin), counted=True, relative=True)
    records = of_losses({"transformer": [2.0], "sas": [value]})
    assert verdict(_only(counted, records), threshold=-1.0) is expected
    healthy = replace(counted, gates=_reached("transformer", 2.1))
    assert verdict(_only(healthy, records)) is Judgement.UNTESTED  # nothing to repair


def test_the_same_numbers_under_two_names_and_what_cannot_be_judged_count_once_or_not():
    """Of a book's p-values: two records may share runs, and two claims may compare the same."""
    close, far = [2.527, 2.537, 2.517], [2.4, 2.6, 2.55]  # p: 0.030 and 0.81
    records = of_losses({"transformer": BASE, "sas": close, "sas-p": far})
    again = of_losses({"transformer": BASE, "sas · a": close}, label="24 layers")
    lower_, other = _contrast("lower"), _contrast("lower", arm="sas-p")
    within = _contrast("lower", margin=0.5)
    gated, counted = (
        replace(other, gates=_reached("transformer", 9.0)),
        replace(other, counted=True),
    )
    first, weak, bounded, unmet, sure = (
        [pool(one, {"a": records})] for one in (lower_, other, within, gated, counted)
    )
    twice = [pool(_contrast("higher", arm="sas · a"), {"b": again})]
    p = twice[0].difference.p
    assert p == pytest.approx(0.03, abs=0.001)
    assert threshold_over([first]) == threshold_over([first, twice]) == p
    # Counted twice it would stand below 2/3 of 5 %.
    assert threshold_over([first, twice, weak]) == threshold_over([first, weak]) < 0
    assert threshold_over([first, bounded, weak]) == p  # against a margin it is another test
    assert threshold_over([first, unmet, sure]) == p


def test_seeds_that_all_agree_hold_no_claim():
    """Not even the claim that there is no difference; the page says why."""
    records = of_losses({"transformer": [0.5] * 3, "sas": [0.5] * 3, "sas-p": [0.4] * 3})
    for margin, arm in ((0.02, "sas"), (None, "sas-p")):
        outcome = _only(_contrast("lower", margin, arm), records)
        assert verdict(outcome, threshold=1.0) is Judgement.UNDECIDED
    row = pool(_contrast("lower", margin=0.02), {"a": records})
    row = replace(row, verdict=row.judgement(1.0))
    assert [*book._remarks(row)] == ["all seeds alike", "margin 0.02"]


def test_a_record_without_the_defect_neither_supports_a_claim_nor_stands_in_its_way():
    """Outliers can only move where there are some, by another number than the one compared."""
    orthoadam = ("transformer · orthoadam", "transformer · orthoadam · rotation_share size")
    noisy = {"transformer": [3.0, 9.0, 6.0], **{key: [8.0, 2.0, 5.0] for key in orthoadam}}
    same = {"transformer": [3.0, 3.1, 2.9], **{key: [3.05, 2.95, 3.0] for key in orthoadam}}
    sources = {}
    for name, kurtosis, rotated in (("sick", [10.0] * 3, same), ("healthy", [3.0] * 3, noisy)):
        arms = {
            arm: [
                {"metric": "kurtosis", "value": kurtosis},
                {"metric": "kurtosis_rotated", "value": values},
            ]
            for arm, values in rotated.items()
        }
        sources[name] = recorded(arms, label=name)
    (claim,) = (one for one in CLAIMS if one.name == "softmax1/move")
    for names, expected in (
        (("sick",), Judgement.HOLDS),
        (("sick", "healthy"), Judgement.HOLDS),
        (("healthy",), Judgement.UNTESTED),
    ):
        rows = [pool(one, {name: sources[name] for name in names}) for one in claim.contrasts]
        assert verdict_of([row.judgement(threshold_over([rows])) for row in rows]) is expected
    text = "\n".join(book.markdown(sources))
    assert "| not counted: kurtosis of the model compared with is below 4 |" in text


def test_a_number_that_a_task_measured_aside_is_not_joined_with_the_final_one():
    """Both are called the loss at this length, and each is of a text of its own."""
    one, aside = {"metric": "loss", "length": 8}, {"task": "hits", "aside": True}
    arms = {
        arm: [{**one, "value": values}, {**one, **aside, "value": [9.0, 9.0]}]
        for arm, values in {"transformer": [2.0, 2.1], "sas": [3.0, 3.1]}.items()
    }
    records = recorded(arms, train={"sequence_length": 8})
    assert _only(_contrast("higher"), records).ours.mean == pytest.approx(3.05)
    hits = replace(LOSS, at={"task": "hits"})
    assert _only(higher("", hits, "sas", "transformer"), records).ours.mean == 9.0


def test_a_contrast_of_differences_and_one_in_shares():
    """A distance is that to the number elsewhere within a seed, whichever is the higher;
    `relative` divides by the baseline."""

    def measured(slope: float, factor: float) -> dict[str, Any]:
        values = near(100 - slope * factor, 1 + slope * factor / 100)
        return {"metric": "perplexity", "factor": factor, "value": values}

    slopes = {"transformer": -10.0, "coca": 1.0}
    arms = {arm: [measured(slope, one) for one in (2.0, 8.0)] for arm, slope in slopes.items()}
    records = recorded(arms)
    two, eight = (number("perplexity", factor=factor) for factor in (2.0, 8.0))
    sides = (two.of(one, minus=eight.of(one), distance=True) for one in ("coca", "transformer"))
    outcome = _only(lower("", two, *sides), records)
    assert outcome.ours.mean == pytest.approx(6 - 0.06)
    assert outcome.theirs.mean == pytest.approx(60 - 0.6)
    assert verdict(outcome) is Judgement.HOLDS
    outcome = _only(ratio("", eight, "coca", two.of("transformer")), records)
    assert outcome.theirs.mean == pytest.approx(1)
    assert outcome.ours.mean == pytest.approx((92 + 1.08) / (120 + 0.8))


def test_a_claim_has_comparisons_that_its_words_tell_apart():
    for claim in CLAIMS:
        assert len({one.words for one in claim.contrasts}) == len(claim.contrasts) > 0, claim.name


@pytest.mark.parametrize("lead", [0.5, 0.2, 0.01])
def test_a_lead_is_compared_across_labels(lead):
    """A baseline's numbers less those of SAS-P. A lead that never was cannot shrink."""
    ever = lead > 0.1
    narrow = {"transformer": [3.0, 3.1, 3.2], "sas-p": [3 - lead, 3.11 - lead, 3.19 - lead]}
    wide = {"transformer": [2.0, 2.1, 2.2], "sas-p": [1.9, 2.01, 2.09]}
    wide |= {} if ever else {"sas-p": [2.4, 2.51, 2.59]}
    both = (("narrow, 64", narrow), ("wide, 192", wide))
    runs = [run for name, losses in both for run in of_losses(losses, label=name).runs]
    records = Records(runs=tuple(runs))
    (outcome,) = outcomes("sas/scaling", records)
    assert outcome.ours.mean == pytest.approx(0.1 if ever else -0.4)
    assert outcome.theirs.mean == pytest.approx(lead)
    # Without the other label there is nothing to compare with, least of all the model itself.
    assert outcomes("sas/scaling", records.labelled("wide, 192")) == []
    assert verdict(outcome) is (Judgement.HOLDS if ever else Judgement.UNTESTED)
    assert outcome.missing == ("" if ever else "the lead compared with is below 0.02")


def _joined(
    folder: Path, name: str, arms: tuple[str, ...], rate: float | None, **header: Any
) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
    """The first job of each seed of an experiment's arms, and its lines, to which a test adds."""
    for one in (one for one in EXPERIMENTS[name].arms("tiny") if one.name in arms):
        for seed in one.seeds:
            job = replace(one, output=folder).runs(rate, seed, (1.5e-3, 3e-3, 6e-3))[0]
            lines = [{"kind": "run", "run": job.arm, **header}]
            yield job, lines
            append(job.records, *lines)


@pytest.mark.parametrize(
    ("rate", "edge"),
    [(1e-3, True), (1.5e-3, True), (3e-3, False), (6e-3, True)],  # 1e-3 was never tried
)
def test_a_rate_at_the_edge_of_those_tried_is_marked(rate, edge, tmp_path):
    """On the page of the experiment and in the book: a better one may lie beyond."""
    share, jobs = {"metric": "first_token_argmax_share", "at": "documents"}, []
    train = {"learning_rate": rate}
    for job, lines in _joined(tmp_path, "sink", ("transformer", "softmax1"), rate, train=train):
        value = 0.5 + 0.01 * job.seed
        lines.append({"kind": "measure", "run": job.arm, **share, "value": value})
        jobs.append(job)
    records = load([stages.collect(jobs, tmp_path / "records.jsonl")])
    assert [run.at_edge for run in records.runs] == [edge] * 6
    (outcome,) = outcomes("softmax1/share", records)
    assert "".join(book._numbers(outcome)).count(book.EDGE) == 2 * edge
    notes = [model.note for model in models(records)]
    assert notes == [f"{who}3 seeds{', rate at the edge' * edge}" for who in ("reference, ", "")]


def test_the_joined_record_of_an_untrained_model_names_its_configuration(tmp_path):
    """So that it can be committed as it is, and its numbers by layer decide a claim."""
    arms, jobs = ("sas-p", "transformer · attention_skip none"), []
    for job, lines in _joined(tmp_path, "signal", arms, None, study="diagnosis", architecture="x"):
        assert job.config.seeds == (job.seed,)
        value = (0.0 if job.arm == "sas-p" else 0.9) + 0.01 * job.seed
        line = {"kind": "measure", "run": job.arm, "metric": "similarity", "cell": "c"}
        lines += [{**line, "layer": layer, "value": value} for layer in (0, 23)]
        jobs.append(job)
    records = load([stages.collect(jobs, tmp_path / "records.jsonl")])
    header = records.of("sas-p")[2].header
    assert header["model"]["from"] == "init:sas-p"
    assert header["model"]["num_hidden_layers"] == 24
    assert header["train"] == {"tokens": 0}
    outcome = outcomes("sas/propagation", records)[0]
    assert verdict(outcome) is Judgement.HOLDS
    assert outcome.theirs.mean == pytest.approx(0.92)


def test_a_repair_is_worth_what_it_gains_at_its_price():
    holds, no, undecided, untested = Judgement
    words = [book.worth(costs, holds) for costs in (holds, no, untested)]
    assert words == ["worth it here", "at a price", "gains; its price is open"]
    words = [book.worth(holds, buys) for buys in (undecided, untested, no)]
    assert words == ["not shown", "not tested", "no"]
