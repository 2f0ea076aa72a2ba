"""The processes that train one model together: their process group, and joint decisions.

torchrun starts and numbers them in the environment. Tensors are sent by nccl between GPUs and
otherwise by gloo; decisions always by gloo, so that none of them waits for a device.
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from clearhead.errors import ClearheadError, first_line
from clearhead.records.identity import differences

T = TypeVar("T")

# What one process does for all, such as preparing text, may take so long.
_PATIENCE = timedelta(days=1)
_ANSWER_SECONDS = 5  # for a process that is asked whether it lives
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOST = re.compile(
    r"gloo|NCCL|TCPStore|[Cc]onnection (closed|reset|refused)|[Tt]imed out|not connected"
)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them; without arguments a single process."""

    rank: int = 0
    size: int = 1
    control: Any = None
    """The gloo group of decisions and of checkpoints."""
    store: Any = None
    """Keys and values of the rendezvous, which outlast a broken group."""

    @property
    def first(self) -> bool:
        """True for rank 0, which writes the records and prints."""
        return self.rank == 0

    def gather(self, value: float) -> list[float]:
        """The `value` of every process, in order of rank."""
        if self.size == 1:
            return [value]
        own = torch.tensor([value], dtype=torch.float64)
        values = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(values, own)
        return [one.item() for one in values]

    def restarted(self) -> bool:
        """True if torchrun has restarted these processes after losing one.

        A machine counts only the restarts for which its own processes were the cause.
        """
        return any(self.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))

    def by_first(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 and return its result, or raise its error, in all processes.

        The result is broadcast, so it must consist of plain values.
        """
        answer: list[Any] = [None]
        with self.together(BaseException):  # the others must not wait
            if self.first:
                answer[0] = call()
        if self.size > 1:
            dist.broadcast_object_list(answer, src=0, group=self.control)
        return answer[0]

    def in_turn(self, call: Callable[[], T]) -> T:
        """Run `call` in every process, on each machine in its first process before the others.

        For cached work, such as preparing text, whose result the others then find.
        """
        leads = self.size == 1 or int(os.environ.get("LOCAL_RANK", 0)) == 0
        value: Any = None
        for turn in (True, False):
            with self.together():
                if leads is turn:
                    value = call()
        return value

    @contextmanager
    def together(self, errors: type[BaseException] = ClearheadError) -> Iterator[None]:
        """Run a body whose `errors` in any process are raised in all; the first prints them."""
        error: BaseException | None = None
        try:
            yield
        except errors as own:
            error = own
        if self.size > 1:
            lines: list[Any] = [None] * self.size
            line = error and (str(error) or type(error).__name__)
            dist.all_gather_object(lines, line, group=self.control)
            failed = [rank for rank, one in enumerate(lines) if one is not None]
            if failed and isinstance(error, ClearheadError | None):
                if error is None or failed[0] != self.rank:
                    error = ClearheadError(lines[failed[0]])
                error.printed_elsewhere = not self.first
        if error is not None:
            raise error

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise a ClearheadError in all processes if any one's facts differ from rank 0's."""
        shared = self.by_first(lambda: facts)
        with self.together():
            for name, first, own in differences(shared, facts):
                raise ClearheadError(
                    f"process {self.rank} has {name} {own!r}, and process 0 {first!r}: give every "
                    "process the same"
                )

    @contextmanager
    def losses_told(self) -> Iterator[None]:
        """Turn the error of losing another process into a one-line ClearheadError naming it."""
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            raise ClearheadError(
                f"process {self.rank} of {self.size} gave up: {self._silent()} ({_line(error)}); "
                "start the run again with --resume, or have torchrun do it: --max-restarts 3"
            ) from error

    def _silent(self) -> str:
        """The processes that do not answer, in words."""
        silent = list(range(self.size))
        with suppress(RuntimeError, AttributeError):  # the store is gone, or none is
            self.store.set(f"alive {self.rank}", "")
            end = time.monotonic() + _ANSWER_SECONDS
            while silent and time.monotonic() < end:
                silent = [rank for rank in silent if not self.store.check([f"alive {rank}"])]
                time.sleep(0.1)
        if 0 < len(silent) < self.size:
            return f"process {', '.join(map(str, silent))} does not answer"
        return "another process does not answer"


ALONE = World()
_worlds: list[World] = []  # the one joined, where one is


@contextmanager
def joined(seconds: float, *, alone: bool = True) -> Iterator[World]:
    """Join torchrun's process group for the body, and leave it afterwards. Nested, a no-op.

    Args:
        seconds: timeout for waiting on another process, here and in every step.
        alone: whether a process not started by torchrun runs without a group.
    """
    if _worlds:
        yield _worlds[-1]
        return
    torchrun = any(name in os.environ for name in _NAMES[:2])
    with ExitStack() as stack:
        store = None
        if not dist.is_initialized():  # else by the caller, who ends it too
            if not torchrun and alone:
                yield World()
                return
            store = _start(timedelta(seconds=seconds), alone=not torchrun)
            stack.callback(dist.destroy_process_group)
        control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        _worlds.append(World(dist.get_rank(), dist.get_world_size(), control, store))
        stack.callback(_worlds.pop)
        with _worlds[-1].losses_told():
            yield _worlds[-1]


def _start(limit: timedelta, *, alone: bool) -> dist.Store:
    """Make the process group; returns the store by which its processes met."""
    gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if alone:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return store
    missing = [name for name in _NAMES if not os.environ.get(name)]
    if missing:
        raise ClearheadError(
            f"the environment says {_NAMES[0]} or {_NAMES[1]}, but not {', '.join(missing)}: start "
            "with torchrun, which sets them all, or unset them"
        )
    if gpu:
        local, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= devices:
            raise ClearheadError(
                f"process {local + 1} of this machine has no GPU of its own, for there are "
                f"{devices}: start torchrun with --nproc-per-node {devices}"
            )
        torch.cuda.set_device(local)
    rank, size, host, port = (os.environ[name] for name in _NAMES)
    try:
        if rank != "0":
            _reach(host, int(port), limit.total_seconds())
        shared, own, of = next(dist.rendezvous("env://", timeout=limit))
        store = _store_of_start(shared, own, of, limit.total_seconds())
        named = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=named, rank=own, world_size=of, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ClearheadError(
            f"process {rank} of {size} cannot meet the others at {host}:{port} within "
            f"{limit.total_seconds():g} s ({_line(error)}): start all {size}, and let them reach "
            "that address"
        ) from error
    return store


def _reach(host: str, port: int, seconds: float) -> None:
    """Wait until the first process listens; PyTorch's own client prints stacks while it waits."""
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=seconds).close()
        except OSError as error:
            if time.monotonic() > end - 0.1:
                raise RuntimeError(error.strerror or str(error)) from error
            time.sleep(0.1)


def _store_of_start(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """The part of `store` that belongs to this start of the processes; waits for all of them.

    torchrun keeps one store through its restarts (pytorch/pytorch#135712): a process that came
    before its peers would connect to the addresses that the killed ones left there. The count of
    restarts is no name for a start, since it differs between machines. So each process leaves a
    word of its own, the first repeats them in a list, and each answers to a list with its word.
    """
    word, end = uuid.uuid4().hex, time.monotonic() + seconds
    store.set(f"came {rank}", word)
    while True:
        if rank == 0:
            came = (f"came {one}" for one in range(1, size))
            words = [store.get(key).decode() if store.check([key]) else "-" for key in came]
            store.set("start", " ".join([word, *words]))
        start = store.get("start").decode().split() if store.check(["start"]) else []
        known = len(start) == size and start[rank] == word
        if known:
            store.set(f"{start[0]} {rank}", "")
            if store.check([f"{start[0]} {one}" for one in range(size)]):
                return dist.PrefixStore(start[0], store)
        if time.monotonic() > end:
            late = [n for n in range(size) if not (known and store.check([f"{start[0]} {n}"]))]
            absent = ", ".join(map(str, late if known else [0]))
            raise RuntimeError(f"process {absent} did not come")
        time.sleep(0.05)


def _line(error: BaseException) -> str:
    """The first line of a message, without the stack and the place in its source."""
    line = first_line(error) or type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically")[0]
