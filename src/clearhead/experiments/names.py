"""Short names of the models that a user gives."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.errors import ClearheadError


def short_names(sources: Sequence[str]) -> list[str]:
    """Short and different: the run's folder rather than its "final".

    Raises:
        ClearheadError: where one model is given twice.
    """
    short = []
    for source in sources:
        path = Path(source.removeprefix("init:"))
        parts = path.parts[:-1] if path.name == "final" and len(path.parts) > 1 else path.parts
        short.append(("init:" if source.startswith("init:") else "") + parts[-1])
    if len(set(short)) == len(short):
        return short
    if len(set(sources)) == len(sources):
        return list(sources)
    raise ClearheadError(f"{sources[0]!r} twice: give two models, or one")
