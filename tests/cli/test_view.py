"""clearhead view from end to end."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from clearhead.data.tokenizer import train

from .conftest import call


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_layer=2, n_head=2, n_positions=32, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(folder)
    train(["to be or not to be"], 300).save_pretrained(folder)
    return folder


_call = partial(call, "view")


def test_a_page_of_the_text_in_a_file(saved, tmp_path, capsys):
    page, file = tmp_path / "page.html", tmp_path / "text.txt"
    file.write_text("to be </script> or not", "utf-8")
    assert _call(saved, "--text", file, "--output", page, "--no-open") == 0
    html = page.read_text("utf-8")
    assert f"wrote {page}" in capsys.readouterr().err
    assert html.count("</script>") == 3
    assert html.count("http://") + html.count("https://") == 0
    assert html.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "b", "c"), "one model or two side by side; found 3"),
        (("x", "--set", "a=1"), "no effect on a trained model: view init:NAME"),
        (("x", "--port", "8000"), "--port has no effect without --live"),
        (("x", "--text", "missing.txt"), "no file missing.txt"),
        (("nowhere/model",), "cannot load a model from 'nowhere/model'"),
        (("x", "--tokens", "1"), "tokens is 1: give a whole number of at least 2"),
        ((), "view needs one or more models"),
    ],
)
def test_requests_that_cannot_be_met(capsys, words, message):
    assert _call(*words) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_written_where_the_text_is_too_long(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert _call(saved, "--text", "to be " * 40, "--output", page, "--no-open") == 2
    assert "gpt2 has 32 learned positions" in capsys.readouterr().err
    assert not page.exists()
