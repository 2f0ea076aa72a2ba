"""clearhead check: a line for each implementation, and an exit status that says if one is wrong."""

import pytest

from tests.diagnose.test_attention_check import broken

from .conftest import call, refusal


def test_a_model_of_transformers_and_a_broken_implementation(llama, capsys):
    broken("no-padding", "padding")
    words = ("--attention", "sdpa", "no-padding")
    assert call("check", llama, *words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM in float32, beside eager attention in float64"
    assert lines[1] == "sdpa: right: plain, padded, packed, cached, chunks"
    assert lines[2].startswith("no-padding: right: plain, cached, chunks; WRONG: padded (")


def test_a_preset_with_changes(capsys):
    shape = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=90")
    assert call("check", "init:sink", "--set", *shape, "sliding_window=9") == 0
    out = capsys.readouterr().out
    assert "sdpa: right: plain, sinks of 20, padded, packed, cached, chunks, windowed" in out
    assert "clearhead: does not load here (left out: a model of ours has the same" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init:sinc",), "did you mean sink"),
        (("./no-such-folder",), "no such folder"),
        (("init:sink", "--attention", "sdpaa"), "none of sdpaa loads here"),
    ],
)
def test_bad_requests(words, said, capsys):
    assert said in refusal(capsys, "check", *words)
