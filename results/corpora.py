"""Make the corpora of the committed records: Python's library, and 130 public-domain books.

    python results/corpora.py FOLDER

writes FOLDER/books-train.jsonl.gz (100 books), books-validation.jsonl.gz (10) and
books-test.jsonl.gz (20), from the files that books.tsv names on GitHub; no author is in two
of them. Each text is checked against the hash of the text that the records were made from: 91
come out to the byte; the names of the others are printed, which differ in white space, line breaks
and marks of emphasis, so that a run on all is near the recorded one and not the same to the bit.

`python-stdlib` needs no file: it is the library of the Python that runs. The records have that of
CPython 3.11 (1,758 files, 31,512,079 bytes), on machines with another Python too.
"""

import argparse
import csv
import gzip
import hashlib
import html
import io
import json
import re
import sys
import unicodedata
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST = Path(__file__).with_name("books.tsv")
RAW = "https://raw.githubusercontent.com"
EMPHASIS = 400  # characters: what is longer is no emphasis, but a stray mark
WRAPPED = 55  # characters: lines of prose in Gutenberg's files are longer, verse is shorter
CREDIT = re.compile(r"Produced by|E-text prepared|This etext|\[Illustration")
LINE = re.compile(r"\s*([-*_]\s*){3,}")  # a rule between sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with MANIFEST.open(encoding="utf-8", newline="") as file:
        books = list(csv.DictReader(file, delimiter="\t"))
    for split in dict.fromkeys(book["split"] for book in books):
        mine = [book for book in books if book["split"] == split]
        write(folder / f"books-{split}.jsonl.gz", made(mine, download))
    return 0


def made(
    books: list[dict[str, str]], fetch: Callable[[str], str]
) -> Iterator[dict[str, str | int | None]]:
    """The rows of a file; `fetch` gives the text that a source names."""
    for book in books:
        raw = fetch(book["source"])
        text = from_gutenberg(raw) if book["gutenberg_id"] else from_markdown(raw)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest != book["sha256_16_of_text"]:
            print(f"differs from the recorded text: {book['title']}", file=sys.stderr)
        yield {
            **{key: book[key] for key in ("title", "author")},
            "year": int(book["year"]),
            "gutenberg_id": int(book["gutenberg_id"]) if book["gutenberg_id"] else None,
            "source": book["source"],
            "text": text,
        }


def download(source: str) -> str:
    """The file that OWNER/NAME@COMMIT:PATH names."""
    place, _, path = source.partition(":")
    repository, _, commit = place.partition("@")
    address = f"{RAW}/{repository}/{commit}/{urllib.parse.quote(path)}"
    try:
        with urllib.request.urlopen(address) as file:
            return str(file.read().decode("utf-8", errors="replace"))
    except OSError as error:  # of the network: urllib's errors are these
        raise SystemExit(f"{address} cannot be had: {error}: try again when it can") from error


def write(path: Path, rows: Iterator[dict[str, str | int | None]]) -> None:
    """Equal rows make equal bytes: the file's header has neither name nor time."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    path.write_bytes(buffer.getvalue())


def from_markdown(text: str) -> str:
    """Plain paragraphs: the header up to the first rule, and headings', quotes' marks taken off."""
    _, rule, body = plain(text).partition("-------")
    paragraphs = []
    for block in re.split(r"\n\s*\n", html.unescape(body if rule else text)):
        lines = [re.sub(r"^(#+|>)\s*", "", line.rstrip()) for line in block.split("\n")]
        lines = [re.sub(r"(\s*\*){3,}$", "", line) for line in lines]
        lines = [line for line in lines if line.strip() and not LINE.fullmatch(line)]
        if lines:
            joined = without_emphasis("\n".join(lines))
            paragraphs.append(re.sub(r"\\([\\`*_{}\[\]()#+\-.!>~|])", r"\1", joined))
    return "\n\n".join(paragraphs).strip("\n") + "\n"


def from_gutenberg(text: str) -> str:
    """What stands between Gutenberg's marks; prose that was wrapped is a line a paragraph."""
    text = plain(text)
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*\n", text, re.DOTALL)
    end = re.search(r"\*\*\* ?END OF", text)
    body = text[start.end() if start else 0 : end.start() if end else len(text)]
    paragraphs = []
    for block in re.split(r"\n\s*\n", body):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        lines = [line for line in lines if not LINE.fullmatch(line)]
        wrapped = [len(line) for line in lines[:-1]] or [WRAPPED]
        prose = sum(wrapped) / len(wrapped) >= WRAPPED
        if lines and not CREDIT.match(lines[0]):
            joined = " ".join(" ".join(lines).split()) if prose else "\n".join(lines)
            paragraphs.append(without_emphasis(joined))
    return "\n\n".join(paragraphs).strip() + "\n"


def plain(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    return unicodedata.normalize("NFC", text)


def without_emphasis(text: str) -> str:
    inner = rf"(?!\s)([^\n]{{1,{EMPHASIS}}}?)(?<!\s)"
    text = re.sub(r"(\*\*|__)(?![_*\s])(.+?)\1", r"\2", text)
    text = re.sub(rf"(?<![\w*\\])\*{inner}\*(?!\w)", r"\1", text)
    return re.sub(rf"(?<![\w\\])_{inner}_(?!\w)", r"\1", text)


if __name__ == "__main__":
    sys.exit(main())
