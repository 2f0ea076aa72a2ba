"""results/corpora.py: books from the files that anyone can download."""

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
_spec = importlib.util.spec_from_file_location("corpora", RESULTS / "corpora.py")
assert _spec is not None
assert _spec.loader is not None
corpora = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(corpora)

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


def test_markdown_becomes_paragraphs():
    wanted = (
        "I - One\n\nSome plain and bold text & more,\nwrapped by hand.\n\nIt was 1846. The end.\n"
    )
    assert corpora.from_markdown(MARKDOWN) == wanted


def test_wrapped_prose_is_joined_and_verse_is_not():
    prose = "A paragraph of prose whose lines were wrapped at some seventy characters"
    wanted = f"{prose} is one line again.\n\n  Verse keeps\n  its lines.\n"
    assert corpora.from_gutenberg(GUTENBERG) == wanted


def test_equal_books_make_equal_files_and_others_are_named(tmp_path, capsys):
    book = {"title": "A", "author": "B", "year": "1846", "gutenberg_id": "", "source": "o/n@c:A.md"}
    book["sha256_16_of_text"] = hashlib.sha256(
        corpora.from_markdown(MARKDOWN).encode()
    ).hexdigest()[:16]
    contents = []
    for name in ("one", "two"):
        corpora.write(tmp_path / name, corpora.made([book], lambda source: MARKDOWN))
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    row = json.loads(gzip.decompress(contents[0]))
    assert (row["year"], row["gutenberg_id"], row["source"]) == (1846, None, "o/n@c:A.md")
    assert capsys.readouterr().err == ""
    list(corpora.made([{**book, "sha256_16_of_text": "0"}], lambda source: MARKDOWN))
    assert capsys.readouterr().err == "differs from the recorded text: A\n"
