"""Batches of every kind of source, frozen: a run that is resumed meets the tokens it began with."""

import gzip
import hashlib
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from clearhead.data import Batches, MaskedBatches, Masking, prepare, tokenizer, with_mask_token

STEPS = (0, 1, 2, 3, 250, 251, 10_000)


@pytest.fixture
def sources(folder, tmp_path, lines):
    """A folder of every format, a text that is cut into pieces, rows in three files."""
    (folder / "bom.txt").write_bytes("\ufeffa naïve text\r\n\tof two lines".encode())
    (folder / "bad.txt").write_bytes(b"\xff\xfe\0")
    (folder / "empty.md").write_text(" \n")
    (folder / "code.py").write_text("def f(x):\n    return '<|end|>' + x\n" * 9)
    (folder / "packed.md.gz").write_bytes(gzip.compress(lines(77).encode()))
    rows = [{"text": lines(seed, 3), "body": lines(seed + 1, 2)} for seed in range(200, 230)]
    rows += [{"text": None, "body": "b"}, {"body": "\ud800 é 😀", "text": "a\ud800b"}]
    content = "\n\n".join(map(json.dumps, rows))
    (folder / "rows.jsonl").write_text(content)
    (folder / "rows2.jsonl.gz").write_bytes(gzip.compress(content[: content.index("\n")].encode()))
    table = pyarrow.table({"number": list(range(32)), "text": [lines(n, 2) for n in range(32)]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=7)
    (tmp_path / "book.txt").write_text("".join(lines(seed) for seed in range(300, 330)))
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress((tmp_path / "book.txt").read_bytes()))
    (tmp_path / "own.jsonl").write_text(content)
    return {
        "folder": folder,
        "book": tmp_path / "book.txt",
        "packed": tmp_path / "book.txt.gz",
        "rows": tmp_path / "own.jsonl",
        "made": "synthetic:recall:documents=40",
    }


def _digest(batches):
    found = hashlib.sha256()
    for step in STEPS:
        for name, tensor in sorted(batches.batch(step).items()):
            found.update(name.encode() + np.ascontiguousarray(tensor.numpy()).tobytes())
    return found.hexdigest()[:16]


# The corpus's fingerprint, then batches of seeds 0 and 7 without and with document masks, those of
# tuning, and masked ones.
FROZEN = {
    "folder": (
        "8e5da34cf5af36be e8fe052c8997e3d2 99d045b64ecc4ed7 f8d5c2ea6aa7f4a6 "
        "19c09ff9a187fcb2 829eb02ee2620590 748c1a0a75f3d508"
    ),
    "folder book rows made": (
        "46886d7846e83e5f 310d96ab18b23d88 9b78789328cee6a2 5a5cacb48909da7a "
        "b11b0b030e2b1cf3 d1b6fb1634515d50 2ed2c99a2aa0cb15"
    ),
    "folder@0.5 packed@0.2 made": (
        "25d02f09e367c59a 79707a74a92ac690 638164d7fb1a0857 8ee2ae529f67ba27 "
        "172aa25ca795b1d6 5b08fec78e842dba 3594122b7a41016f"
    ),
    "rows": (
        "9e270ee1bcb38040 c618d7478d3383ef ebd632dd8a773217 e8e7675e874f60ac "
        "d2b6ce111d4dc7a4 067e426c548bcbdd d79e538343776eeb"
    ),
    "book folder": (
        "ed54708c309874bc 486dae939ad0635a a88f3a3cd4ed5f80 7de01dd4058d1b8e "
        "b84c1cc1ff5cbd74 432ddb2ffcbef484 036fd17e665a20c8"
    ),
}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("folder", {}),
        ("folder book rows made", {}),
        ("folder@0.5 packed@0.2 made", {}),
        ("rows", {"text_field": "body"}),
        ("book folder", {"limit": 9000}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_batches_are_those_of_before(words, options, sources, configure, monkeypatch):
    monkeypatch.setattr(tokenizer, "trained_identity", lambda vocabulary: f"BPE {vocabulary}")
    monkeypatch.chdir(sources["folder"].parent)
    names = [one.partition("@") for one in words.split()]
    data = [f"{sources[name]}{at}{weight}" for name, at, weight in names]
    corpus = prepare(configure(*data, vocabulary=300, **options))
    shape = {"sequence_length": 33, "batch_size": 4}
    found = [corpus.fingerprint[:16]]
    for seed in (0, 7):
        found += [
            _digest(Batches(corpus, seed=seed, document_masks=masks, **shape))
            for masks in (False, True)
        ]
    found.append(_digest(Batches(corpus.for_tuning(), seed=0, **shape)))
    masked = with_mask_token(corpus)
    found.append(
        _digest(MaskedBatches(Batches(masked, seed=1, **shape), Masking(masked.tokenizer)))
    )
    assert " ".join(found) == FROZEN[words]
