"""Memory that is freed and asked for again: mapped anew, or kept."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="settings of glibc's allocator"
)

# 64 MiB, written and freed ten times over: 16,384 pages of 4 KiB each time.
FAULTS = """
import resource, sys
if "keep" in sys.argv:
    from clearhead.allocator import keep_freed_memory
    keep_freed_memory()
block = b"x" * (64 << 20); del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = b"x" * (64 << 20); del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("words", "own", "kept"),
    [
        ((), {}, False),
        (("keep",), {}, True),
        (("keep",), {"MALLOC_MMAP_MAX_": "65536"}, False),  # the user's own settings stay
    ],
)
def test_freed_memory_is_kept_for_the_next_step(words, own, kept):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, *words]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=clean | own)
    assert (int(ran.stdout) < 100) == kept
