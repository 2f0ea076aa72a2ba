"""clearhead view from end to end."""

import json
import re
from pathlib import Path

import pytest

from clearhead.data.tokenizer import train

from .conftest import call, refusal, saved


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train(["to be or not to be"], 300)
    size = {"vocab_size": 300, "max_position_embeddings": 32}
    return saved(tmp_path_factory.mktemp("models") / "gpt2", tokenizer, "GPT-2", **size)


def test_a_page_of_the_text_in_a_file(gpt2, tmp_path, capsys):
    page, file = tmp_path / "page.html", tmp_path / "text.txt"
    file.write_text("to be </script> or not", "utf-8")
    assert call("view", gpt2, "--text", file, "--output", page) == 0
    html = page.read_text("utf-8")
    assert f"wrote {page}" in capsys.readouterr().err
    assert html.count("</script>") == 3
    assert html.count("http://") + html.count("https://") == 0
    assert html.startswith("<!doctype html>")


def _tokens(page: Path) -> list[str]:
    data = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    return json.loads(data[1])["models"][0]["tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "b", "c"), "one model or two side by side; found 3"),
        (("x", "--text", "missing.txt"), "missing.txt: no such file or folder: give an existing"),
        (("x", "--text", "wide.txt"), "byte 0x00 at offset 3 is not UTF-8"),
        (("x", "--text", "latin.txt"), "byte 0xe9 at offset 3 is not UTF-8"),
        (("x", "--text", "empty.txt"), "holds no text"),
        (("x", "--tokens", "1"), "tokens is 1: give a whole number of at least 2"),
    ],
)
def test_requests_that_cannot_be_met(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("wide.txt").write_text("to be\n", "utf-16")
    Path("latin.txt").write_text("café\n", "latin-1")
    Path("empty.txt").write_text(" \n")
    assert message in refusal(capsys, "view", *words)


@pytest.mark.parametrize("text", ["日本語2.5度です。", "and/or", "3.14", "e.g.", "me@home"])
def test_a_word_with_a_dot_or_a_slash_is_a_text(text, gpt2, tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "text.txt"
    file.write_text(text, "utf-8")
    read = []
    for given in (text, file):
        words = ("--text", given, "--tokens", "8", "--output", page)
        assert call("view", gpt2, *words) == 0
        read.append(_tokens(page))
    assert read[0] == read[1]
