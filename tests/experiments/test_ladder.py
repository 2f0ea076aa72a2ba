"""A comparison at several sizes."""

import json
from pathlib import Path

import pytest

from clearhead.data import DataConfig
from clearhead.errors import ClearheadError
from clearhead.experiments.configs import CompareConfig
from clearhead.experiments.ladder import ladder, rungs_of
from clearhead.models import plan, preset
from clearhead.train import TrainConfig

TRAIN = TrainConfig(tokens=64, sequence_length=16, batch_size=2, log_every=1, precision="fp32")


def _config(*sizes: str, **options) -> CompareConfig:
    return CompareConfig(presets=("transformer", "sas-p"), sizes=sizes, train=TRAIN, **options)


def test_tokens_grow_with_the_parameters_and_heads_keep_their_width() -> None:
    large, small = "128", "64"
    rungs = list(rungs_of(_config(large, small, output=Path("out"))))
    assert [one.label for one in rungs] == ["width 64", "width 128"]
    assert [one.output for one in rungs] == [Path("out/width-64"), Path("out/width-128")]
    assert [one.set["num_attention_heads"] for one in rungs] == [2, 4]
    shapes = [preset("transformer", "tiny", **one.set) for one in rungs]
    few, many = (plan(shape).non_embedding_parameters for shape in shapes)
    assert rungs[0].train.tokens == 64
    assert rungs[1].train.tokens == pytest.approx(64 * many / few, abs=TRAIN.tokens_per_step)
    assert all(one.measure_every == 0.05 for one in rungs)
    arms = [preset(arm.preset, "tiny", **arm.model) for arm in rungs[1].arms]
    assert plan(arms[1]).parameters < plan(arms[0]).parameters  # SAS-P has fewer on purpose


def test_named_sizes_and_a_label(tmp_path) -> None:
    rungs = list(rungs_of(_config("small", "tiny", label="mine", measure_every=0.5)))
    assert [(one.size, one.label) for one in rungs] == [
        ("tiny", "mine, tiny"),
        ("small", "mine, small"),
    ]
    assert rungs[0].measure_every == 0.5


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (("65",), "sizes names a width of 65: give a multiple of 32"),
        (("0",), "sizes names a width of 0"),
        (("huge",), "unknown size 'huge'"),
        (("64", "64"), "sizes"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, said) -> None:
    with pytest.raises(ClearheadError, match=said):
        list(rungs_of(_config(*sizes)))


def test_a_ladder_is_run_joined_and_resumed(tmp_path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"the sink of head {number} is a key. " * 20)
    data = DataConfig(data=(str(texts),), vocabulary=300, validation=0.2, cache=tmp_path / "cache")
    config = _config(
        *("32", "64"),
        set={"num_hidden_layers": 1},
        lengths=(1,),
        evaluation_tokens=64,
        data=data,
        output=tmp_path / "out",
        measure_every=0.5,
    )
    records = ladder(config, say=str)
    assert records.labels() == ["width 32", "width 64"]
    for label in records.labels():
        labelled = records.labelled(label)
        assert labelled.arms() == ["transformer", "sas-p"]
        for run in labelled.runs:
            assert run.header["forward_flops"] > 0
            assert run.value("loss", length=16) is not None
            assert run.select("loss", step=run.steps[-1]["step"])
    before = (tmp_path / "out/records.jsonl").read_bytes()
    said: list[str] = []
    ladder(config, say=said.append)
    assert sum("already done" in line for line in said) == 4
    assert (tmp_path / "out/records.jsonl").read_bytes() == before
    headers = [json.loads(line) for line in before.splitlines() if b'"kind": "run"' in line]
    assert len({header["run"] for header in headers}) == 4
