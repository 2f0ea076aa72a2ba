"""Ctrl-C and SIGTERM ask the loop to stop; the loop decides when."""

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is only noted, in `received`.

    After it, Ctrl-C means what it usually does: KeyboardInterrupt, at once. Outside the main
    thread Python allows no handlers, so nothing is installed. The handlers found are put back on
    exit.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._found: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._found[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._found.items():
            # None: the handler was installed by C code, and Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
