"""Every experiment has arms at each of its scales, and measures there what its claims compare."""

from collections.abc import Iterator, Sequence
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
from clearhead.papers.requests import EXPERIMENTS, arms_for, chosen
from clearhead.papers.study import Study

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
