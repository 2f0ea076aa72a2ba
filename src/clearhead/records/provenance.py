"""Provenance: the software, hardware and command that made a record."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.versions import versions

if TYPE_CHECKING:
    import torch

_SOURCE = Path(__file__).resolve().parents[1]
# What `provenance` may tell. Records of before lack some.
KEYS = ("versions", "commit", "dirty", "device", "threads", "command", "date")


def provenance(device: "torch.device") -> dict[str, Any]:
    """Values of `KEYS`, as far as they are known here, without paths that the user did not give."""
    import torch

    threads, path = torch.get_num_threads(), Path(sys.argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} threads"
    return {
        "versions": versions(),
        **source(),
        "device": f"{device.type}, {named}",
        "threads": threads,
        "command": shlex.join([*program, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def source() -> dict[str, Any]:
    """In a git checkout the "commit", and "dirty" where files of the package differ from it."""
    # The package may lie, ignored, in another project's checkout: only tracked files count.
    if _git("ls-files", "--error-unmatch", "versions.py") is None:
        return {}
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return {"commit": commit.strip(), "dirty": changed != ""} if commit else {}


def source_of(record: Mapping[str, Any]) -> str:
    """Description of the source code that made a record; "" if it is not recorded."""
    if not record.get("commit"):
        return ""
    return f"commit {record['commit']}" + ", with changes" * bool(record.get("dirty"))


def _git(*words: str) -> str | None:
    # Within a git hook these variables name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(_SOURCE), *words]
    try:
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
