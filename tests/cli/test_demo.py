"""`clearhead demo`, at the smallest scale: its parts, its page, and what it refuses."""

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clearhead.cli.publishing import publish
from clearhead.lab.demo import SCHEMES, CopiedShare, Studies, run_demo, studies
from clearhead.progress import Line, Work
from clearhead.records.loading import load
from clearhead.report.demo import page

from .conftest import call


@pytest.fixture(scope="module")
def small(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Studies:
    """The demo's own studies with two steps a run and two seeds."""
    on_text, sinks = studies(tmp_path_factory.mktemp("demo"))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

    def shrunk(config, **data):
        train = replace(config.train, tokens=64, sequence_length=16, batch_size=2)
        keys = {**config.set, **shape, "max_position_embeddings": 16}
        source = replace(config.data, cache=cache, **{"vocabulary": 300, **data})
        return replace(
            config, train=train, set=keys, data=source, seeds=(0, 1), evaluation_tokens=64
        )

    # A token for each word of the copied text.
    copied = {"data": ("synthetic:backcopy:documents=200,characters=360",), "vocabulary": 512}
    short = replace(shrunk(on_text, data=(str(text),), limit=None), lengths=(1, 2))
    return short, shrunk(sinks, **copied)


@pytest.fixture(scope="module")
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def found(small: Studies, log: io.StringIO) -> dict[str, Path]:
    return _run(small, Line(log))


def _run(small: Studies, work: Work, **options) -> dict[str, Path]:
    asked = {"pretrained": None, "trust_remote_code": False, **options}
    return run_demo(small, small[0].output.parent, work=work, **asked)


def test_the_demo_trains_measures_and_shows_every_part(found, log, tmp_path, capsys):
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("run 1 of 20: transformer, seed 0")
    assert any(re.match(r"run 20 of 20, .* left: few bits", line) for line in lines)
    text, sinks, bits = (load(found[part]) for part in ("text", "sinks", "bits"))
    assert text.arms() == ["transformer", "sas-p", "alibi", "coca"]
    repairs = ["repaired", "softmax1", "gated", "differential", "differential-v2"]
    assert sinks.arms() == ["transformer", *repairs]
    assert bits.arms() == ["transformer", "repaired"]
    for records in (text, sinks, bits):
        assert all(len(records.of(arm)) == 2 for arm in records.arms())
    for arm in sinks.arms():
        assert all(0 < one < 1 for one in sinks.values(arm, "copied_share").values())
        for metric, theirs in (("null_mass", "softmax1"), ("prefix_mass", "repaired")):
            assert len(sinks.values(arm, metric, map="softmax")) == 2 * (arm == theirs)
    for scheme in SCHEMES:
        assert all(len(bits.values(arm, "perplexity", scheme=scheme)) == 2 for arm in bits.arms())
    publish(page(*map(load, found.values())), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text("utf-8")
    assert re.search(r'<p class="lead">[^<]*standard Transformer', html)
    assert html.count('<figure class="panel">') == 5
    assert "page: " in capsys.readouterr().out


def test_a_second_call_trains_nothing_and_counts_the_runs_as_done(small, found, capsys):
    work = Work()
    assert _run(small, work) == found
    assert capsys.readouterr().err.count("already done") == 18
    assert work.share == 1


def test_a_pretrained_model_stands_beside(small, found, tmp_path):
    model = small[0].output / "transformer-seed0"
    more = _run(small, Work(), pretrained=str(model))
    diagnosis, bits = load(more["diagnosis"]), load(more["pretrained bits"])
    (run,) = diagnosis.runs
    assert run.value("hidden_top_1") > run.value("hidden_median") > 0
    assert bits.runs[0].value("perplexity", scheme="w8a8-coarse") is not None
    publish(page(*map(load, more.values())), tmp_path / "report.html")
    assert run.arm in (tmp_path / "report.html").read_text("utf-8")


def test_a_missing_model_is_refused_before_any_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert call("demo", "--pretrained", "./model") == 2
    err = capsys.readouterr().err
    assert "clearhead: cannot load a model from './model'" in err
    assert not (tmp_path / "demo/text").exists()


def test_the_share_on_the_token_to_copy_is_read_where_all_before_it_were_copied():
    """The token 9 always copies, 5 does so once of two times; keys before a query weigh alike."""
    ids = torch.tensor([[1, 9, 1, 5, 1, 9], [2, 9, 2, 5, 3, 4]])
    weights = torch.ones(2, 1, 6, 6).tril() / torch.arange(1, 7)[:, None]
    tile = SimpleNamespace(start=0, maps=[SimpleNamespace(weights=-weights)])
    statistic = CopiedShare(ids)
    statistic.observe(SimpleNamespace(layer=0), tile)
    share = statistic.measures()[0]
    assert share["metric"] == "copied_share"
    assert share["value"] == pytest.approx(1 / 2)  # both of them after one other token
