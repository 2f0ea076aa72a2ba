"""Files that evaluations read: their fingerprints, used as cache keys."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clearhead.errors import ClearheadError


def file_digest(path: Path) -> str:
    """A hash of a file's bytes, as 12 hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def check_files(task: str, files: Sequence[str], example: str) -> None:
    """Refuse an empty list of files, and two files of one name: tables name them so."""
    if not files:
        raise ClearheadError(f"{task} needs files: for example --{task}.files {example}")
    names = Counter(Path(file).name for file in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ClearheadError(f"two files are called {twice[0]}: tables name them so; rename one")
