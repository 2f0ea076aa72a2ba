"""Checkpoints written beside the training, by a thread."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, cast

# The public DefaultStager of torch 2.11 can be used once.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from clearhead.errors import ClearheadError
from clearhead.train import memory
from clearhead.train.world import World

# For the parts of other processes, where one of them was lost.
_PATIENCE_SECONDS = 5.0


class Saver:
    """Writes one checkpoint at a time.

    Used as a context manager it waits at the end for the one at hand, also where the training
    failed; a second Ctrl-C leaves it unpublished.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._thread: Thread | None = None
        self._path: Path | None = None
        self._error: Exception | None = None
        self._stager: StateDictStager | None = None
        self._preparing: Thread | None = None

    def prepare(self, tensors: dict[str, Any]) -> bool:
        """Have a thread make copies of the tensors once, so that `copies` finds memory in use.

        Fresh memory takes six times as long to fill. False where the copies do not fit.
        """
        if self._stager is None and memory.has_room_for(tensors.values()):
            self._stager = StateDictStager()
            self._preparing = Thread(target=self._stager.stage, args=(tensors,), daemon=True)
            self._preparing.start()
        return self._stager is not None

    def copies(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copies of prepared tensors in host memory, which the next ones take again."""
        assert self._stager is not None
        assert self._preparing is not None
        self._preparing.join()
        return cast("dict[str, Any]", self._stager.stage(tensors))

    def start(self, write: Callable[[], Path], *, beside: bool) -> None:
        """Call `write`, which returns what it published, in a thread or here."""
        if not beside:
            self._call(write)
            return
        self._thread = Thread(target=self._call, args=(write,), daemon=True)
        self._thread.start()

    def published(self) -> Path | None:
        """The checkpoint published since the last call, if any."""
        path, self._path = self._path, None
        return path

    def finish(self) -> None:
        """Wait until the checkpoint at hand is published.

        Raises:
            ClearheadError: in all processes, where one of them could not write.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None and not isinstance(error, ClearheadError):
            raise error
        self.world.share_error(error)

    def _call(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except Exception as error:
            self._error = error

    def _join(self, seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        lost = error is not None and not isinstance(error, ClearheadError) and self.world.size > 1
        self._join(_PATIENCE_SECONDS if lost else None)
