"""The choice of repairs from records of `together`, by criteria written beforehand."""

import json
from pathlib import Path

import pytest

from clearhead.cli import main
from clearhead.records.loading import load
from clearhead.reproduce import EXPERIMENTS
from clearhead.reproduce.composition import (
    MEASURES,
    REPAIRS,
    choose_repairs,
    judge_composition,
)


def _records(
    folder: Path,
    effects: dict[str, dict[str, float]],
    seeds=range(6),
    experiment: str = "together",
) -> Path:
    """Runs of all arms of an experiment; `effects` move a measure of the arms of a repair."""
    from fnmatch import fnmatchcase

    lines = []
    for arm in (one.name for one in EXPERIMENTS[experiment].trials("tiny")):
        for seed in seeds:
            name = f"{arm}/seed{seed}"
            head = {"kind": "run", "run": name, "arm": arm, "preset": arm, "seed": seed}
            lines.append({**head, "label": experiment, "train": {"sequence_length": 8}})
            for words, one in MEASURES.items():
                value = 3 + 0.001 * seed
                for repair, moved in effects.items():
                    if fnmatchcase(arm, REPAIRS.get(repair, (repair,))[0]):
                        value += moved.get(f"{words} later" if seed > 2 else words, 0)
                        value += moved.get(words, 0) if seed > 2 else 0
                line = {"kind": "measure", "run": name, "metric": one.metric, **one.at}
                if one.times:
                    line["length"] = int(8 * one.times)
                if one.metric == "added_perplexity":  # counted from the perplexities
                    line |= {"metric": "perplexity", "value": 10.0 + value}
                lines.append({"value": value, **line})
            full = {"kind": "measure", "run": name, "metric": "perplexity", "value": 10.0}
            lines.append(full)
    path = folder / f"{experiment}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_repairs_enter_that_win_on_more_than_they_lose_and_again_on_other_seeds(tmp_path):
    effects = {
        "position=alibi": {"loss at 4 × the length": -0.5},
        # A win that other seeds reverse.
        "normalizer=softmax1": {"kurtosis": -0.5, "kurtosis later": 1.0},
        # Two wins that cost loss.
        "epilogue=gate": {"kurtosis": -0.7, "cost of w4-channel": -0.5, "loss": 0.1},
        "blocks of sas-p": {"loss": -0.2, "kurtosis": 0.7},  # one against one
    }
    path = _records(tmp_path, effects)
    choices = {one.repair: one for one in choose_repairs(load([path]))}
    assert {name for name, one in choices.items() if one.enters} == {"position=alibi"}
    assert choices["normalizer=softmax1"].wins == ("kurtosis",)
    assert choices["normalizer=softmax1"].confirmed == ()
    assert choices["epilogue=gate"].losses == ("loss",)
    assert choices["epilogue=gate"].dearer
    assert choices["maps=differential-v2"].wins == choices["maps=differential-v2"].losses == ()
    assert choices["maps=differential-v2"].in_words().endswith("found again: none")


def test_the_composition_is_judged_beside_the_baseline_on_seeds_that_did_not_choose(tmp_path):
    effects = {"clearhead": {"loss": -0.2, "kurtosis": 0.7, "cost of w8a8-coarse": -0.3}}
    path = _records(tmp_path, effects, range(3, 6), "composition")
    found = judge_composition(load([path]))
    assert found is not None
    assert found.wins == ("loss", "cost of w8a8-coarse")
    assert found.losses == ("kurtosis",)
    assert found.enters
    assert "found again" not in found.in_words()
    costly = _records(tmp_path, {"clearhead": {"loss": 0.2}}, range(3, 6), "composition")
    assert not judge_composition(load([costly])).enters
    assert judge_composition(load([_records(tmp_path, {})])) is None


def test_seeds_that_confirm_are_asked_for(tmp_path, capsys):
    path = _records(tmp_path, {"position=alibi": {"loss": -0.5}}, seeds=range(3))
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--compose", str(path)])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "position=alibi: out; better on loss; worse on nothing; found again: not run\n" in out
    path = _records(tmp_path, {}, seeds=(3, 4, 5))
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--compose", str(path)])
    assert stop.value.code == 2
    assert "run clearhead reproduce together" in capsys.readouterr().err
