"""The experiments as code: arms at each scale, what claims compare there, options of a request."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.sweep_configs import DiagnoseConfig, PlanConfig, QuantizeConfig
from clearhead.papers.claims import CLAIMS
from clearhead.papers.contrasts import Claim, Contrast, Reading
from clearhead.papers.requests import EXPERIMENTS, arms_for, changed, chosen
from clearhead.papers.study import Study


@pytest.mark.parametrize("study", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_an_experiment_is_one_short_function_that_marks_its_intervention(study):
    lines = inspect.getsource(study.arms).splitlines()
    assert len(lines) < 30
    assert any("intervention" in line.lower() for line in lines)


def test_every_table_and_figure_that_a_claim_stands_for_is_a_name_of_it():
    named = [(claim, place) for claim in CLAIMS for place in (claim.name, *claim.also)]
    assert len(named) == len({place for _, place in named}) > len(CLAIMS)
    for claim, place in named:
        assert place.startswith(f"{claim.family}/")
        assert chosen([place], "tiny") == chosen([claim.name], "tiny")


def test_each_seed_starts_from_a_rotation_that_it_draws(tmp_path):
    """Else the spread over seeds would leave out how lucky the only rotation was."""
    trials = {one.name: one for one in EXPERIMENTS["retrofit"].arms("small")}

    def made(name: str, *seeds: int) -> list[str]:
        one = replace(trials[name], output=tmp_path)
        if seeds:
            one = replace(one, seeds=seeds)
        firsts = [one.runs(1e-5 if one.tries else None, seed)[0] for seed in one.seeds]
        for seed, first in zip(one.seeds, firsts, strict=True):
            assert first.after.config.seed == seed * ("turned" in name)
        firsts += [one.attempt(1e-5)] * one.is_swept
        return [*dict.fromkeys(first.after.name for first in firsts if first.after is not None)]

    turned = "models/rotate=residual-values-down-prefix=-n"
    for name in ("prefix turned", "prefix turned trained"):
        assert made(name) == [turned, f"{turned}-seed=1", f"{turned}-seed=2"]
        assert made(name.replace("turned", "turned equal")) == [
            f"{turned}{seed}-equal" for seed in ("", "-seed=1", "-seed=2")
        ]
        searched = turned.replace("prefix=-n", "prefix=auto")
        assert made(name.replace("prefix turned", "searched turned learned")) == [
            f"{searched}{seed}-learned-equal" for seed in ("", "-seed=1", "-seed=2")
        ]
    # A sweep starts from the same rotation, whichever seeds count.
    assert made("prefix turned trained", 1, 2) == [f"{turned}-seed=1", f"{turned}-seed=2", turned]
    assert made("prefix turned", 1) == [f"{turned}-seed=1"]
    assert made("prefix rotated") == ["models/rotate=down-prefix=-n"]


def test_deep_outliers_are_sought_with_the_gains_that_they_were_seen_with():
    """At kurtosis 100 SAS-P's norms had a gain for each channel (results/blocks.jsonl)."""
    norms = {one.name: one.side.model["norm"] for one in EXPERIMENTS["outliers-deep"].arms("small")}
    assert norms.pop("sas-p · norm rmsnorm") == "rmsnorm"
    assert {*norms.values()} == {"rmsnorm-single"}
    (plain,) = (one for one in EXPERIMENTS["blocks"].arms("small") if one.key == "24 layers/sas-p")
    assert "norm" not in plain.side.model


# Option, its value, and the experiment, scale and arm whose jobs it changes.
OPTIONS = [
    ("seeds", (7,), "blocks", "tiny", "sas"),
    ("tokens", 8192, "blocks", "tiny", "sas"),
    ("data", ("own.txt",), "long-context", "paper", "alibi"),
    ("data", ("own.txt",), "signal", "tiny", "sas"),
    ("base", "own-model", "retrofit", "tiny", "prefix turned"),
    ("test_data", ("own.txt",), "retrofit", "tiny", "as it is"),
    ("test_data", ("own.txt",), "outliers", "tiny", "transformer"),
    ("questions", ("bits",), "retrofit", "tiny", "dense"),
]


def _configs(one: Study) -> list[object]:
    jobs = one.runs(next(iter(one.tries), None), one.seeds[0])
    return [job.config for job in (*jobs, *(job.after for job in jobs if job.after))]


@pytest.mark.parametrize(("option", "value", "study", "scale", "arm"), OPTIONS)
def test_an_option_changes_a_job(option, value, study, scale, arm):
    (one,) = (one for one in EXPERIMENTS[study].arms(scale) if one.name == arm)
    before = _configs(one)
    after = _configs(changed(one, **{option: value}))
    assert after != before
    said = str(after)
    for word in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
        assert option in ("seeds", "questions") or word in said


def test_own_text_takes_the_place_of_the_hubs_where_there_is_some():
    one = EXPERIMENTS["retrofit"].arms("tiny")[0]
    asked = changed(one, test_data=("own.txt",)).questions
    assert asked["bits"].data == replace(one.questions["bits"].data, data=("own.txt",))
    assert asked["bits"].data.validation == 0.999
    assert asked["code"] == one.questions["code"]


SCALES = ("tiny", "small", "paper")
BY_TOKENS = ("kurtosis", "kurtosis_rotated", "largest_activation")
# Task of an evaluation → its numbers that claims compare.
NUMBERS = {
    "perplexity": ("perplexity",),
    **dict.fromkeys(("passkey", "needles"), ("accuracy",)),
    "shots": ("accuracy", "margin"),
    "hits": ("ar_hit_loss",),
    "allocation": ("answer_share", "noise_share"),
    "hallucination": ("unsupported_names", "names_above_chance"),
}
# Words of comparisons that a scale leaves to another experiment, or for which the paper gives no
# setting.
ELSEWHERE = {
    "tiny": ("one gain a norm", "twenty tokens a parameter", "SAS-P, 24 layers", "passkeys of 512"),
    "small": ("passkeys alone in",),
    "paper": ("kurtosis under SGD",),
}
Numbers = tuple[str, dict[str, Any]]


@pytest.mark.parametrize("scale", SCALES)
def test_an_experiment_has_arms_at_each_of_its_scales(scale):
    for one in EXPERIMENTS.values():
        assert bool(_measured(one.name, scale)) == (scale in one.scales), one.name


@pytest.mark.parametrize("scale", SCALES)
def test_a_claim_can_be_judged_at_a_scale_or_is_refused_there(scale):
    for claim in CLAIMS:
        if not arms_for(claim, scale):
            with pytest.raises(ClearheadError, match=f"^{claim.name} has no arms at {scale}, "):
                chosen([claim.name], scale)
            continue
        assert chosen([claim.name], scale)
        for one in claim.contrasts:
            elsewhere = any(words in one.words for words in ELSEWHERE[scale])
            assert _is_judged(claim, one, scale) != elsewhere, one.words


def _is_judged(claim: Claim, contrast: Contrast, scale: str) -> bool:
    """True if both sides have the number, and those that decide whether it counts."""
    arms = _measured(claim.study, scale)

    def there(label: str, patterns: Sequence[str], one: Reading) -> bool:
        return any(
            fnmatchcase(arm, pattern) and fnmatchcase(place, label) and _has(length, numbers, one)
            for pattern in patterns
            for place, arm, length, numbers in arms
        )

    readings = [contrast.ours, contrast.theirs, *(one.reading for one in contrast.gates)]
    return all(there(part.label, part.arm, part) for one in readings for part in one.parts)


def _has(length: int, numbers: Sequence[Numbers], reading: Reading) -> bool:
    asked = dict(reading.at)
    if reading.times is not None:
        asked["length"] = round(reading.times * length)
    return any(
        metric == reading.metric and asked.items() <= given.items() for metric, given in numbers
    )


@cache
def _measured(study: str, scale: str) -> list[tuple[str, str, int, list[Numbers]]]:
    """Label, arm, training length and numbers of every model of an experiment."""
    if scale not in EXPERIMENTS[study].scales:
        return []
    found = []
    for trial in EXPERIMENTS[study].arms(scale):
        place = (trial.label, trial.name, trial.train.sequence_length)
        numbers = [*_of_training(trial)] if trial.tries else []
        for name, question in trial.questions.items():
            if isinstance(question, FinetuneJob):
                fine_tuned = (place[0], f"{trial.name} on {name}", place[2])
                found.append((*fine_tuned, [("accuracy", {})] if name != "stsb" else []))
            else:
                numbers += _of_question(trial, question)
        found.append((*place, numbers))
    return found


def _of_training(trial: Study) -> Iterator[Numbers]:
    masked = trial.presets[0].startswith("bert")
    for times in trial.lengths:
        length = times * trial.train.sequence_length
        for metric in ("masked loss", "masked accuracy") if masked else ("loss", "perplexity"):
            yield metric, {"length": length}
    yield "tokens_per_second", {}
    if trial.lengths:
        yield "first_token_argmax_share", {}
        yield from ((one, {"tokens": two}) for one in BY_TOKENS for two in ("first", "rest"))


def _of_question(trial: Study, question: Any) -> Iterator[Numbers]:
    if isinstance(question, PlanConfig):
        for metric, length in product(("step_bytes", "cached_key_bytes"), question.lengths):
            yield metric, {"task": "memory", "length": length}
    elif isinstance(question, QuantizeConfig):
        for name in ("added_perplexity", "cost"):
            yield from ((name, {"scheme": one}) for one in question.scheme)
    elif isinstance(question, DiagnoseConfig):
        yield from _of_diagnosis(trial, question)
    else:
        yield from _of_evaluation(question)


def _of_diagnosis(trial: Study, question: DiagnoseConfig) -> Iterator[Numbers]:
    at = {} if question.at == "anywhere" else {"at": question.at}
    for metric in ("logit_top_1", "first_token_argmax_share", "beta_over_alpha"):
        yield metric, at
    yield from ((metric, at) for metric in ("anomalous_before", "order_broken_content"))
    yield from ((one, {**at, "tokens": two}) for one in BY_TOKENS[::2] for two in ("first", "rest"))
    for layer in range(trial.side.model.get("num_hidden_layers", 6)):
        for metric in ("similarity", "effective_rank", "beta_over_alpha_values"):
            yield metric, {**at, "layer": layer}
    for position in (1 << power for power in range(question.length.bit_length() - 1)):
        yield "null_mass", {**at, "map": "softmax", "position": position}
        yield "gate_closed", {**at, "position": position}


def _of_evaluation(question: Any) -> Iterator[Numbers]:
    scalings = [{"scaling": "none"}] * ("none" in question.rope_scaling)
    for kind, factor in product(question.rope_scaling, question.factors):
        scalings += [{"scaling": kind, "factor": float(factor)}] * (kind != "none")
    for task in question.tasks:
        options: list[dict[str, Any]] = [{}]
        if task == "needles":
            grid = [map(int, one.split("x")) for one in question.needles.grid]
            options = [dict(zip(("needles", "queries"), one, strict=True)) for one in grid]
        if task == "shots":
            options = [{"order": "random"}]
        for metric in NUMBERS.get(task, ("acc",)):
            for length, scaling, given in product(question.lengths or (0,), scalings, options):
                yield metric, {"task": task, "length": length, **scaling, **given}
