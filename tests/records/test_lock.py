"""Locks between real processes, some of them killed."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from clearhead.errors import ClearheadError
from clearhead.records.files import hold_file, hold_folder

HOLDER = """
import sys
from pathlib import Path
from clearhead.records.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

FORKING = """
import os, sys, time
from pathlib import Path
from clearhead.records.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder "run" until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_in_one_line_that_names_the_owner(holder, tmp_path):
    run = tmp_path / "run"
    owner = f"process {holder.pid} on {socket.gethostname()} since 20"
    with (
        pytest.raises(ClearheadError, match=f"run is in use by {owner}") as caught,
        hold_folder(run),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert [path.name for path in run.iterdir()] == [".lock"]
    holder.communicate("\n")
    assert not run.exists()  # made for the lock, and still empty


def test_a_killed_owners_lock_is_taken_over_reaped_or_not(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table
    with hold_folder(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_child_of_a_killed_owner_does_not_hold_its_lock(tmp_path):
    """As a data loader's worker, which lives on for a while."""
    words = [sys.executable, "-c", FORKING, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        os.kill(child, 0)  # alive
        with hold_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_what_a_killed_owner_was_writing_is_removed(tmp_path):
    (tmp_path / ".writing-7-records.jsonl").write_text("half a l")
    (tmp_path / ".writing-final").mkdir()
    (tmp_path / "records.jsonl").write_text("whole")
    with hold_folder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "records.jsonl"}


def test_nothing_stays_after_an_error_and_a_file_that_was_written_stays(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    with pytest.raises(ZeroDivisionError), hold_file(path):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with hold_file(path):
        path.write_text("{}\n")
        with pytest.raises(ClearheadError, match="in use"), hold_file(path):
            pass
    assert list(path.parent.iterdir()) == [path]


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path):
    child = -1
    try:
        with hold_folder(tmp_path / "run"):
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert (tmp_path / "run" / ".lock").exists()
    finally:
        if child == 0:  # it has left the block too
            os._exit(0)
