"""Experiments of the book in a few steps, which try the machinery alone.

One whose models are trained and one that starts from a model; and all of them by `make attack`.
"""

import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from clearhead.cli import main
from clearhead.data import DataConfig
from clearhead.lab.configs import FinetuneJob
from clearhead.lab.sweep_configs import DiagnoseConfig, EvaluateSettings, PlanConfig, QuantizeConfig
from clearhead.named_models import SIZES
from clearhead.papers import requests
from clearhead.papers.claims import CLAIMS, judged
from clearhead.papers.study import Experiment, Question, Study
from clearhead.records.loading import load
from clearhead.settings.eval import OPTIONS

from ..cli.conftest import call

ALL = os.environ.get("CLEARHEAD_SMOKE") == "all"
JOBS = 400
"""Jobs of a few seconds each, at most. Two idle cores take three to six minutes, by machine: a
bound in seconds would say more of the machine than of the experiments."""
# Claims that smoke has no numbers for: GLUE and what a model is able to do are downloads, six
# needles do not fit its windows, it reads under one factor of NTK, and has no 24 layers.
LEFT_OUT = (
    *("sas/glue", "diff/table1", "diff/table4", "diff/figure6", "diff/figure7"),
    *("diff/table2", "coca/table3", "sas/propagation"),
)
WINDOWS, HEAD = 2, 8
STEPS: dict[str, Any] = {
    **{"batch_size": WINDOWS, "accumulation": 1, "ramp": 0.0, "compile": "none"},
    **{"log_every": 1, "save_every": 0},
}
# Options of evaluations that count how much is drawn, and what is drawn here.
FEW: dict[str, Any] = {
    **dict.fromkeys(("trials", "samples", "queries"), 1),
    **{"depths": (0.5,), "grid": ("1x1",), "document_tokens": None},
}
DOWNLOADS = ("shots", "hallucination")  # and tasks of lm-eval


def smoke(one: Study, base: str) -> Study:
    """The arm with one seed, one rate, four steps and two narrow layers, on text at hand; where it
    starts from a trained model, that is `base`."""
    length, based = one.train.sequence_length, one.base is not None
    heads = {**SIZES[one.size], **({} if based else one.side.model)}["num_attention_heads"]
    shape = {"hidden_size": HEAD * heads, "num_hidden_layers": 2}
    kept = {key: x for key, x in one.set.items() if key not in ("head_dim", "intermediate_size")}
    text = _at_hand(one.data)
    fresh = replace(text, vocabulary=512)
    little = replace(
        one,
        set=kept if based else {**kept, **shape},
        seeds=(0,),
        lengths=one.lengths[:2],
        evaluation_tokens=WINDOWS * length,
        measure_every=0,
        train=replace(one.train, tokens=4 * WINDOWS * length, **STEPS),
        data=text if based else fresh,
        questions={
            name: _little(question, length)
            for name, question in one.questions.items()
            if not (isinstance(question, FinetuneJob) or _downloads(question))
        },
        tries=one.tries[:1],
    )
    if one.conversion is not None and one.conversion.prefix == "auto":
        # A model of four steps has no sink that a token would take.
        given = replace(one.conversion, prefix=r"\n", calibrate=None)
        little = replace(little, conversion=given)
    return replace(little, base=base) if based else little


def _downloads(question: Question) -> bool:
    local = OPTIONS.keys() - DOWNLOADS
    return isinstance(question, EvaluateSettings) and not local.issuperset(question.tasks)


def _at_hand(data: DataConfig) -> DataConfig:
    """Hub sources give way to the standard library's."""
    words = dict.fromkeys("python-stdlib" if one.startswith("hf:") else one for one in data.data)
    return DataConfig(data=tuple(words), limit=200_000, validation=data.validation)


def _little(question: Question, length: int) -> Question:
    if isinstance(question, FinetuneJob | PlanConfig):
        return question
    read: dict[str, Any] = {"data": _at_hand(question.data)}
    if isinstance(question, DiagnoseConfig):
        if question.at == "anywhere":  # a document has the length that it has
            read["length"] = length
        return replace(question, windows=WINDOWS, **read)
    if isinstance(question, QuantizeConfig):
        return replace(question, length=length, tokens=WINDOWS * length, **read)
    for name in OPTIONS.keys() & {*question.tasks}:
        options = getattr(question, name)
        read[name] = replace(options, **{key: FEW[key] for key in FEW if hasattr(options, key)})
    return replace(
        question,
        lengths=question.lengths[:1] + question.lengths[1:][-1:],
        tokens=2 * max(question.lengths, default=question.tokens),
        factors=question.factors[1:2] or question.factors,  # of all the one that claims name
        split="validation",
        **read,
    )


def experiments(base: str = "") -> dict[str, Experiment]:
    """The experiments, each with these arms at `tiny`."""
    return {
        name: one._replace(
            arms=cache(lambda _, arms=one.arms: [smoke(arm, base) for arm in arms("tiny")])
        )
        for name, one in requests.EXPERIMENTS.items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run, and beside it the cache of every experiment's tokens."""
    folder = tmp_path_factory.mktemp("smoke")
    shape = ("hidden_size=24", "num_hidden_layers=2", "max_position_embeddings=512")
    text = ("--data.limit", "200000", "--data.vocabulary", "512", "--train.tokens", "4096")
    words = (*text, "--data.cache", folder / "cache", "--train.log-every", 1)
    assert call("train", "--set", *shape, *words, "--output", folder / "base") == 0
    return folder / "base"


@pytest.fixture
def reproduced(base, capsys, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(base.with_name("cache")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(requests, "EXPERIMENTS", experiments(f"{base}/final"))

    def run(*words, folder):
        with pytest.raises(SystemExit) as stop:
            main(["reproduce", *words, "--output", str(folder)])
        assert stop.value.code == 0, capsys.readouterr().err

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["encoders"], ["retrofit", "--only", "dense", "prefix turned trained"]]
)
def test_an_experiment_runs_whole_and_ends_with_its_page(words, reproduced, tmp_path, capsys):
    name, *some = words
    reproduced(*words, folder=tmp_path / name)
    for claim, outcomes, _ in judged({name: load(tmp_path / name / "records.jsonl")}):
        if claim.study == name and not some and claim.name not in LEFT_OUT:
            assert outcomes, claim.name
    assert (tmp_path / name / "report.html").exists()
    assert "claims: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="all of them take minutes: by `make attack`")
def test_all_experiments_run_whole_and_end_with_the_book(reproduced, tmp_path, capsys):
    reproduced("all", folder=tmp_path)
    assert 0 < len([*tmp_path.glob("*/logs/**/*.done")]) <= JOBS
    records: dict[str, Path] = {one.parent.name: one for one in tmp_path.glob("*/records.jsonl")}
    studies = {claim.study for claim in CLAIMS}
    assert {*records} == studies
    assert all((tmp_path / name / "report.html").exists() for name in records)
    assert "claims: " in capsys.readouterr().out
    for claim, outcomes, _ in judged({name: load(path) for name, path in records.items()}):
        if claim.name not in LEFT_OUT:
            assert outcomes, claim.name
