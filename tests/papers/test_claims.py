"""The claims: what each compares, and the verdicts on records that are known."""

import json
from dataclasses import replace
from typing import Any

import pytest

from clearhead.papers import book, stages
from clearhead.papers.claims import CLAIMS, Pooled, pool, threshold_over, verdict_of
from clearhead.papers.contrasts import (
    LOSS,
    Contrast,
    Gate,
    Judgement,
    Outcome,
    higher,
    lower,
    number,
    ratio,
    reaches,
)
from clearhead.papers.requests import EXPERIMENTS, cost
from clearhead.papers.study import Study
from clearhead.records.loading import load
from clearhead.records.runs import Records
from clearhead.report.pivots import models

from .making import near, outcomes, recorded


def _records(losses: dict[str, list[float]], label: str = "6 layers") -> Records:
    """Losses by seed, and a milestone, which says something else."""
    one = {"metric": "loss", "length": 8}
    arms = {
        arm: [{**one, "value": values}, {**one, "value": [9.0] * len(values), "step": 5}]
        for arm, values in losses.items()
    }
    return recorded(arms, label=label, train={"sequence_length": 8})


def _contrast(claimed: str, margin: float = 0.0, arm: str = "sas") -> Contrast:
    sides = {"ours": LOSS.of(arm), "theirs": LOSS.of("transformer")}
    return Contrast(**sides, claimed=claimed, words="", margin=margin)


def _only(contrast: Contrast, records: Records) -> Outcome:
    """The only outcome of a contrast in records."""
    (outcome,) = contrast.outcomes({"a": records})
    return outcome


def _reached(arm: str, least: float) -> tuple[Gate]:
    return (reaches(LOSS, arm, least),)


@pytest.mark.parametrize(
    ("claimed", "margin", "values", "verdict"),
    [
        ("lower", 0, [2.0, 2.01, 1.99], Judgement.HOLDS),
        ("higher", 0, [2.0, 2.01, 1.99], Judgement.DOES_NOT_HOLD),
        ("lower", 0, [2.4, 2.6, 2.55], Judgement.UNDECIDED),
        ("lower", 0, [2.0], Judgement.UNDECIDED),  # a seed has no spread
        ("not higher", 0.1, [2.5, 2.51, 2.52], Judgement.HOLDS),
        ("not higher", 0.001, [2.5, 2.51, 2.52], Judgement.UNDECIDED),
        ("not higher", 0.1, [3.0, 3.01, 3.02], Judgement.DOES_NOT_HOLD),
        ("not higher", 0.1, [2.61, 2.62, 2.6], Judgement.UNDECIDED),  # higher; by how much?
        ("not lower", 0.1, [2.39, 2.4, 2.38], Judgement.UNDECIDED),
        ("not lower", 0.1, [2.0, 2.01, 2.02], Judgement.DOES_NOT_HOLD),
    ],
)
def test_a_contrast_is_judged_by_its_interval_and_margin(claimed, margin, values, verdict):
    records = _records({"transformer": [2.5, 2.51, 2.49], "sas": values})
    outcome = _only(_contrast(claimed, margin), records)
    assert outcome.ours.mean == pytest.approx(sum(values) / len(values))
    assert outcome.judgement(threshold=0.05) is verdict
    # Among many comparisons: within a margin, too.
    assert outcome.judgement(threshold=0.0) is Judgement.UNDECIDED


@pytest.mark.parametrize(
    ("claimed", "margin", "value", "verdict"),
    [
        ("not higher", -0.5, 1.0, Judgement.HOLDS),  # at most half
        ("not higher", -0.5, 1.001, Judgement.DOES_NOT_HOLD),
        ("not lower", 0.1, 1.8, Judgement.HOLDS),
        ("lower", 0.0, 2.0, Judgement.DOES_NOT_HOLD),
        ("higher", 0.0, 2.1, Judgement.HOLDS),
    ],
)
def test_a_counted_number_needs_no_seeds(claimed, margin, value, verdict):
    """Whatever the threshold: there is no chance in it."""
    counted = replace(_contrast(claimed, margin), counted=True, relative=True)
    records = _records({"transformer": [2.0], "sas": [value]})
    assert _only(counted, records).judgement(threshold=-1.0) is verdict
    healthy = replace(counted, gates=_reached("transformer", 2.1))
    assert _only(healthy, records).judgement(0.05) is Judgement.UNTESTED  # nothing to repair


def test_the_same_numbers_under_two_names_and_what_cannot_be_judged_count_once_or_not():
    """Of a book's p-values: two records may share runs, and two claims may compare the same."""
    near, far = [2.527, 2.537, 2.517], [2.4, 2.6, 2.55]  # p: 0.030 and 0.81
    records = _records({"transformer": [2.5, 2.51, 2.49], "sas": near, "sas-p": far})
    arms = {"transformer": [2.5, 2.51, 2.49], "sas · a": near}
    again = _records(arms, label="24 layers")

    def row(contrast: Contrast, source: str = "a", given: Records = records) -> list[Pooled]:
        return [pool(contrast, [*contrast.outcomes({source: given})])]

    lower_, other = _contrast("lower"), _contrast("lower", arm="sas-p")
    first, weak = row(lower_), row(other)
    twice = row(_contrast("higher", arm="sas · a"), "b", again)
    p = twice[0].difference.p
    assert p == pytest.approx(0.03, abs=0.001)
    assert threshold_over([first]) == threshold_over([first, twice]) == p
    # Counted twice it would stand below 2/3 of 5 %.
    assert threshold_over([first, twice, weak]) == threshold_over([first, weak]) < 0
    # Against a margin it is another test.
    within = row(_contrast("not higher", margin=0.5))
    assert threshold_over([first, within, weak]) == p
    gated = row(replace(other, gates=_reached("transformer", 9.0)))
    counted = row(replace(other, counted=True))
    assert threshold_over([first, gated, counted]) == p


def test_seeds_that_all_agree_hold_no_claim():
    """Not even the claim that there is no difference; the page says why."""
    records = _records({"transformer": [0.5] * 3, "sas": [0.5] * 3, "sas-p": [0.4] * 3})
    for claimed, arm in (("not higher", "sas"), ("lower", "sas-p")):
        outcome = _only(_contrast(claimed, margin=0.02, arm=arm), records)
        assert outcome.judgement(threshold=1.0) is Judgement.UNDECIDED
    row = pool(_contrast("not higher", margin=0.02), [outcome])
    assert [*book._remarks(row)] == ["all seeds alike", "margin 0.02"]


def _measured(arms: dict[str, dict[str, list[float]]], label: str) -> Records:
    """Records of three seeds an arm, by metric."""
    lines = {
        arm: [{"metric": metric, "value": values} for metric, values in metrics.items()]
        for arm, metrics in arms.items()
    }
    return recorded(lines, label=label)


def test_a_record_without_the_defect_neither_supports_a_claim_nor_stands_in_its_way():
    """Outliers can only move where there are some, by another number than the one compared."""
    orthoadam = ("transformer · orthoadam", "transformer · orthoadam · rotation_share size")
    noisy = {"transformer": [3.0, 9.0, 6.0], **{arm: [8.0, 2.0, 5.0] for arm in orthoadam}}
    same = {"transformer": [3.0, 3.1, 2.9], **{arm: [3.05, 2.95, 3.0] for arm in orthoadam}}
    sources = {}
    for name, kurtosis, rotated in (("sick", [10.0] * 3, same), ("healthy", [3.0] * 3, noisy)):
        arms = {arm: {"kurtosis": kurtosis, "kurtosis_rotated": x} for arm, x in rotated.items()}
        sources[name] = _measured(arms, name)
    (claim,) = (one for one in CLAIMS if one.name == "softmax1/move")

    def verdict(*names: str) -> Judgement:
        chosen = {name: sources[name] for name in names}
        rows = [pool(one, [*one.outcomes(chosen)]) for one in claim.contrasts]
        return verdict_of([row.judgement(threshold_over([rows])) for row in rows])

    assert verdict("sick") is verdict("sick", "healthy") is Judgement.HOLDS
    assert verdict("healthy") is Judgement.UNTESTED
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
    assert outcome.judgement(threshold=0.05) is Judgement.HOLDS
    outcome = _only(ratio("", eight, "coca", two.of("transformer")), records)
    assert outcome.theirs.mean == pytest.approx(1)
    assert outcome.ours.mean == pytest.approx((92 + 1.08) / (120 + 0.8))


def test_a_claim_has_a_family_and_comparisons_that_its_words_tell_apart():
    for claim in CLAIMS:
        assert claim.contrasts, claim.name
        assert len({one.words for one in claim.contrasts}) == len(claim.contrasts), claim.name


@pytest.mark.parametrize(
    ("rate", "edge"),
    [(1e-3, True), (1.5e-3, True), (3e-3, False), (6e-3, True)],  # 1e-3 was never tried
)
def test_a_rate_at_the_edge_of_those_tried_is_marked(rate, edge, tmp_path):
    """On the page of the experiment and in the book: a better one may lie beyond."""
    trials = [
        replace(one, output=tmp_path)
        for one in EXPERIMENTS["sink"].arms("tiny")
        if one.name in ("transformer", "softmax1")
    ]
    tried = (1.5e-3, 3e-3, 6e-3)
    jobs = [one.runs(rate, seed, tried)[0] for one in trials for seed in one.seeds]
    for job in jobs:
        run = {"kind": "run", "run": job.arm, "train": {"learning_rate": rate}}
        share = {"metric": "first_token_argmax_share", "at": "documents"}
        measure = {"kind": "measure", "run": job.arm, **share, "value": 0.5 + 0.01 * job.seed}
        job.records.parent.mkdir(parents=True)
        job.records.write_text("".join(json.dumps(line) + "\n" for line in (run, measure)))
    records = load([stages.collect(jobs, tmp_path / "records.jsonl")])
    assert [run.at_edge for run in records.runs] == [edge] * 6
    (outcome,) = outcomes("softmax1/share", records)
    assert "".join(book._numbers(outcome)).count(book.EDGE) == 2 * edge
    notes = [model.heading.note for model in models(records)]
    assert notes == [f"{who}3 seeds{', rate at the edge' * edge}" for who in ("reference, ", "")]


def test_a_lead_is_compared_across_labels():
    """A baseline's numbers less those of SAS-P. A lead that never was cannot shrink."""
    untested = Judgement.UNTESTED
    wide = {"transformer": [2.0, 2.1, 2.2], "sas-p": [1.9, 2.01, 2.09]}
    for lead, verdict in ((0.5, Judgement.HOLDS), (0.2, Judgement.HOLDS), (0.01, untested)):
        narrow = {"transformer": [3.0, 3.1, 3.2], "sas-p": [3 - lead, 3.11 - lead, 3.19 - lead]}
        worse = {"transformer": wide["transformer"], "sas-p": [2.4, 2.51, 2.59]}
        later = wide if lead > 0.1 else worse
        both = (("narrow, 64", narrow), ("wide, 192", later))
        parts = [_records(losses, label=name).runs for name, losses in both]
        records = Records(runs=tuple(run for part in parts for run in part))
        (outcome,) = outcomes("sas/scaling", records)
        assert outcome.ours.mean == pytest.approx(0.1 if lead > 0.1 else -0.4)
        # Without the other label there is nothing to compare with, least of all the model itself.
        assert outcomes("sas/scaling", records.labelled("wide, 192")) == []
        assert outcome.theirs.mean == pytest.approx(lead)
        assert outcome.judgement(threshold=0.05) is verdict
    assert outcome.missing == "the lead compared with is below 0.02"


def test_the_joined_record_of_an_untrained_model_names_its_configuration(tmp_path):
    """So that it can be committed as it is, and its numbers by layer decide a claim."""
    trials = [
        replace(one, output=tmp_path)
        for one in EXPERIMENTS["signal"].arms("tiny")
        if one.name in ("sas-p", "transformer · attention_skip none")
    ]
    jobs = [job for one in trials for seed in one.seeds for job in one.runs(None, seed)]
    for job in jobs:
        name, value = job.config.models[0], 0.0 if job.arm == "sas-p" else 0.9
        assert job.config.seeds == (job.seed,)
        job.records.parent.mkdir(parents=True)
        lines = [{"kind": "run", "study": "diagnosis", "run": name, "architecture": "x"}]
        for layer in (0, 23):
            line = {"kind": "measure", "run": name, "metric": "similarity", "layer": layer}
            lines.append({**line, "value": value + 0.01 * job.seed, "cell": "c"})
        job.records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = load([stages.collect(jobs, tmp_path / "records.jsonl")])
    header = records.of("sas-p")[2].header
    assert header["model"]["from"] == "init:sas-p"
    assert header["model"]["num_hidden_layers"] == 24
    assert header["train"] == {"tokens": 0}
    outcome = outcomes("sas/propagation", records)[0]
    assert outcome.judgement(threshold=0.05) is Judgement.HOLDS
    assert outcome.theirs.mean == pytest.approx(0.92)


def test_the_tokens_of_a_long_experiment_are_written_out():
    arms = [Study().changed(tokens=500_000_000).arm("transformer", 1e-3)] * 2
    assert cost(arms, "small").startswith("6 runs, 3,000 M tokens, ")


@pytest.mark.parametrize(
    ("costs", "buys", "word"),
    [
        ("HOLDS", "HOLDS", "worth it here"),
        ("DOES_NOT_HOLD", "HOLDS", "at a price"),
        ("UNTESTED", "HOLDS", "gains; its price is open"),
        ("HOLDS", "UNDECIDED", "not shown"),
        ("HOLDS", "UNTESTED", "not tested"),
        ("HOLDS", "DOES_NOT_HOLD", "no"),
    ],
)
def test_a_repair_is_worth_what_it_gains_at_its_price(costs, buys, word):
    assert book.worth(Judgement[costs], Judgement[buys]) == word
