"""Time and memory of a corpus of any size: `pytest -s` prints what is measured.

A file of 100 GB is a small one with a hole at its end.
"""

import json
import os
import subprocess
import sys

import pytest

from clearhead.data import prepare
from clearhead.data.corpus import map_stream
from clearhead.data.stat_cache import keep, state_of
from clearhead.errors import ClearheadError

SIZE = 10**11
OPEN = """
import json, sys, time
from pathlib import Path
from clearhead.data import Batches, DataConfig, prepare
from clearhead.models.loading import load_tokenizer
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return [int(line.split()[1]) >> 10 for line in lines if "VmHWM" in line][0]
data, cache = sys.argv[1:]
imported = peak()  # PyTorch's build for GPUs takes twice as much as that for CPUs
config = DataConfig(data=(data,), vocabulary=280, validation=0.2, cache=Path(cache))
said = []
began = time.perf_counter(), time.process_time()
corpus = prepare(config, progress=said.append)
taken = time.perf_counter() - began[0], time.process_time() - began[1]
batches = Batches(corpus, sequence_length=2048, batch_size=8, seed=0, document_masks=True)
for step in range(200):
    batches.batch(step)
print(json.dumps([said, sum(map(len, corpus.split("train"))), *taken, imported, peak()]))
"""


@pytest.fixture
def large(folder, configure):
    """A corpus whose shard is extended to 100 GB, and verified so."""
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    config = configure(folder)
    content = prepare(config)
    (build,) = (config.cache / "corpora").iterdir()
    with open(build / "0.train.tokens", "r+b") as file:
        file.truncate(SIZE)
    files = sorted(path for path in build.rglob("*") if path.is_file())
    for path in files:
        os.utime(path, (1e9, 1e9))
    # As if its content had been hashed once.
    state = state_of(files, [path.name for path in files])
    index = json.loads((build / "corpus.json").read_bytes())
    keep(config.cache / "checked" / f"{build.name}.json", state, index)
    assert content.describe()["documents"] == 30
    return config


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_a_hundred_gigabytes_are_opened_in_two_seconds_and_read_in_200_megabytes(large):
    words = [sys.executable, "-c", OPEN, *large.data, str(large.cache)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    said, tokens, seconds, own, imported, peak = json.loads(ran.stdout)
    print(f"opened {SIZE / 1e9:.0f} GB in {seconds:.2f} s ({own:.2f} s of CPU); peak {peak} MiB")
    assert "reusing the tokens" in said[-1]
    assert tokens == SIZE // 2
    assert own < 2
    assert peak - imported < 200


def test_windows_are_read_without_being_kept(tmp_path):
    """Mapped pages would count as the process's memory, and bring their neighbours."""
    with open(tmp_path / "0.train.tokens", "wb") as file:
        file.truncate(SIZE)
    (tmp_path / "0.train.starts").write_bytes(b"")
    stream = map_stream(tmp_path, 0, "train", "<u2", spec="s", weight=None)
    before = _resident()
    for number in range(2000):
        stream.window(number * 20_000_003, 2048)
    assert _resident() - before < 16


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_shard_that_is_cut_short_while_it_is_read_is_one_line(folder, configure):
    config = configure(folder)
    corpus = prepare(config)
    (build,) = (config.cache / "corpora").iterdir()
    (stream,) = corpus.split("train")
    assert stream.window(10, 20).tolist() == stream.tokens[10:30].tolist()
    length = len(stream)
    os.truncate(build / "0.train.tokens", 20)
    with pytest.raises(ClearheadError, match="was cut short while it was in use: start again"):
        stream.window(length - 20, 20)
