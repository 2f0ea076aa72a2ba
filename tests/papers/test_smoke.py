"""Experiments of the book in a few steps, as `smoke` makes them.

One whose models are trained and one that starts from a model; and all of them by `make attack`.
"""

import os
import sys
from pathlib import Path

import pytest

from clearhead.cli import main
from clearhead.papers import requests
from clearhead.papers.claims import CLAIMS, judged
from clearhead.records.loading import load

from ..cli.conftest import call
from . import smoke

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
    monkeypatch.setattr(requests, "EXPERIMENTS", smoke.experiments(f"{base}/final"))

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
