"""Answers of a server to prompts, folder by folder; for programs that run without clearhead."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def write(
    ask: Callable[..., dict[str, Any]], prompts: str, out: str, folders: Sequence[str]
) -> None:
    """Write {folder: answer, or why it is refused} as JSON, after each folder anew."""
    found: dict[str, Any] = {}
    asked = json.loads(Path(prompts).read_text())
    for folder in folders:
        try:
            found[folder] = ask(folder, **asked)
        except Exception as error:  # what a refusal says belongs in the record
            found[folder] = {"refused": str(error)}
        Path(out).write_text(json.dumps(found))
