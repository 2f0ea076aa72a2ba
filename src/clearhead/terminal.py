"""Terminal output: control characters in foreign text are shown escaped, never acted upon."""

import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but tab and line feed; marks that reorder text; lone surrogates, which a file
# name may hold and no stream encodes.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def open_streams() -> None:
    """Make standard output and error accept any text, even where the process began without them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed, as by `>&-`: the next file opened would be it
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Flush standard output. If that fails, redirect it to the null device and raise the error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise


def printable(text: str) -> str:
    r"""Replace each character that a terminal might act on by its escape, such as \x1b."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(line: str) -> None:
    """Print a note on standard error; under torchrun only the first process does."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(line), file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Print a line about a result."""
    print(printable(line))


@contextmanager
def hushed(logger: str, level: int = logging.ERROR) -> Iterator[None]:
    """Silence a library's logger below `level` while the body runs."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def write(text: str) -> None:
    """Print text that is itself the result: unchanged into a pipe or file, safe on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text)


def console(**options: Any) -> "Console":
    """A rich console, for tables and progress bars, that prints nothing but printable text."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render_str(self, text: str, **style: Any) -> Any:
            return super().render_str(printable(text), **style)  # before columns are measured

        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):  # whatever the text came in
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return PrintableConsole(**options)
