"""Files and folders that are either whole or not there, whenever the process or machine dies."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError

_PREFIX = ".writing-"


def require_new(target: Path) -> None:
    """Raise a ClearheadError where a folder exists: before work that `publish_folder` publishes."""
    if target.exists():
        raise ClearheadError(f"{target} exists: give the folder of a model not made yet")


@contextmanager
def publish_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; give it that name once all it holds is on the disk.

    If the body fails the folder is removed and nothing else changes. `target` must not exist
    (`require_new`).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(_PREFIX + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`; at no moment is it missing or half written."""
    temporary = path.with_name(_PREFIX + path.name)
    try:
        temporary.write_text(text, encoding="utf-8")
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` by `value` as readable JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was still writing directly under `folder`."""
    for path in folder.glob(_PREFIX + "*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
