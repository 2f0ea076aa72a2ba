"""Signal handlers by which Ctrl-C, SIGTERM and a closed terminal stop the loop after a step."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Context in which the first SIGINT, SIGTERM or SIGHUP is only recorded, in `received`; a later
    Ctrl-C raises KeyboardInterrupt. After SIGHUP the terminal is gone: output is discarded. One
    that is ignored, as under nohup, stays so. Only the main thread may have handlers."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._found: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._found[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._found.items():
            # None: the handler was installed by C code, and Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGHUP:
            for stream in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
