"""A build that was killed goes on from what is whole, to the bytes of one that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from clearhead.data import prepare, tokenisation, tokenizer
from clearhead.data.journal import JOURNAL
from clearhead.errors import ClearheadError
from clearhead.records.identity import digest_of

# For each line CACHE NUMBER a child makes a corpus, and dies by SIGKILL at the operation of that
# number, from 1, on a file of its build. One start of Python serves all.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import transformers.tokenization_utils_tokenizers
from clearhead.data import DataConfig, prepare, tokenisation
from clearhead.models.loading import load_tokenizer
tokenisation._MARK_BYTES, tokenisation._BATCH_CHARACTERS = 4000, 3000

def run(cache, left):
    def watch(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove") and ".building-" in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    data = tuple(sys.argv[1:])
    config = DataConfig(data=data, vocabulary=280, validation=0.2, cache=Path(cache))
    said = []
    try:
        prepare(config, progress=said.append)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)

for line in sys.stdin:
    cache, number = line.rsplit(maxsplit=1)
    child = os.fork()
    if child == 0:
        run(cache, int(number))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def files_of(cache):
    (folder,) = (cache / "corpora").iterdir()
    assert folder.name[0] != "."
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_build_killed_again_and_again_has_the_bytes_of_one_that_was_not(folder, lines, tmp_path):
    rows = tmp_path / "rows.jsonl"
    texts = (lines(number) for number in range(100, 115))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [sys.executable, "-c", PROGRAM, str(folder), str(rows)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def build(name, number):
            server.stdin.write(f"{tmp_path / name} {number}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        assert build("whole", 0) == 0
        status, number, marks = -signal.SIGKILL, 5, []
        while status:
            status = build("cache", number)
            assert status in (0, -signal.SIGKILL)
            journals = list((tmp_path / "cache" / "corpora").glob(f".building-*/{JOURNAL}"))
            marks += [len(journal.read_bytes().splitlines()) for journal in journals]
            number += 9
        server.stdin.close()
    assert marks == sorted(marks)
    assert len(set(marks)) > 3
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


@pytest.fixture
def interrupted(folder, configure, monkeypatch):
    """A config, and the folder of its build, interrupted at the tenth batch."""
    monkeypatch.setattr(tokenisation, "_MARK_BYTES", 4000)
    monkeypatch.setattr(tokenisation, "_BATCH_CHARACTERS", 3000)
    calls = []

    def encode(self, texts, original=tokenizer.Encoder.encode):
        calls.append(texts)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return original(self, texts)

    config = configure(folder)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.Encoder, "encode", encode)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    (build,) = (config.cache / "corpora").iterdir()
    assert build.name.startswith(".building-")
    return config, build


@pytest.fixture
def encoded(monkeypatch):
    """The texts that are tokenised."""
    texts = []

    def encode(self, batch, original=tokenizer.Encoder.encode):
        texts.extend(batch)
        return original(self, batch)

    monkeypatch.setattr(tokenizer.Encoder, "encode", encode)
    return texts


def finished(config, configure, said=None):
    """Finishes the build, and asserts that it has the bytes of one made in one go."""
    prepare(config, progress=(said if said is not None else []).append)
    whole = configure(*config.data, cache=config.cache.parent / "whole")
    prepare(whole)
    assert files_of(config.cache) == files_of(whole.cache)


def test_what_is_whole_is_neither_tokenised_again_nor_trained(
    interrupted, configure, encoded, monkeypatch
):
    config, build = interrupted
    marks = [json.loads(line) for line in (build / JOURNAL).read_text().splitlines()]
    done = marks[-1]["mark"][1]
    assert 0 < done < 30
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "train", None)
        said = []
        prepare(config, progress=said.append)
    assert len(encoded) == 30 - done
    assert any("going on with an interrupted build: " in line for line in said)
    finished(config, configure)


def damaged_at_its_end(build):
    with open(build / "0.train.tokens", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def emptied(build):
    os.truncate(build / "0.train.starts", 0)


def torn(build):
    path = build / JOURNAL
    path.write_bytes(path.read_bytes()[:-20])


def of_another_tokenizer(build):
    path = build / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")


def without_its_tokenizer(build):
    shutil.rmtree(build / "tokenizer")


def of_longer_text(build):
    """As if more had been written after the last mark."""
    with open(build / "0.train.tokens", "ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "damage",
    [
        damaged_at_its_end,
        emptied,
        torn,
        of_another_tokenizer,
        without_its_tokenizer,
        of_longer_text,
    ],
)
def test_what_is_not_whole_is_made_anew(interrupted, configure, damage):
    config, build = interrupted
    damage(build)
    finished(config, configure)


def test_text_that_changed_meanwhile_and_back_is_begun_anew(interrupted, configure, folder):
    """Marks say of which text they are."""
    config, build = interrupted
    journal = build / JOURNAL
    first = json.loads(journal.read_text().splitlines()[0])
    first["mark"][2] = "of another text"
    del first["seal"]
    journal.write_text(json.dumps({**first, "seal": digest_of(first)}) + "\n")
    with pytest.raises(ClearheadError, match="changed while it was read; run again"):
        prepare(config)
    assert not build.exists()
    finished(config, configure)


def test_a_process_waits_for_another_that_makes_the_same(folder, configure, encoded, monkeypatch):
    config, corpora, said, first = configure(folder), [], [], threading.Event()

    def train(texts, vocabulary, original=tokenizer.train):
        thread.start()
        assert first.wait(20)
        return original(texts, vocabulary)

    def second():
        def say(line):
            said.append(line)
            if "waiting for another process" in line:
                first.set()

        corpora.append(prepare(config, progress=say))

    thread = threading.Thread(target=second)
    monkeypatch.setattr(tokenizer, "train", train)
    corpora.append(prepare(config))
    thread.join()
    assert len(encoded) == 30
    assert corpora[0].fingerprint == corpora[1].fingerprint
    assert "reusing the tokens" in said[-1]
