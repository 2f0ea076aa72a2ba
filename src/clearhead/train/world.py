"""The processes that train one model together: their process group, and joint decisions.

torchrun starts and numbers them in the environment. Tensors are sent by nccl between GPUs and
otherwise by gloo; decisions always by gloo, so that none of them waits for a device.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
_LOST = re.compile(r"gloo|NCCL|TCPStore|[Cc]onnection|[Tt]imed out|not connected")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them; by default a single process. `control` is the
    gloo group of decisions and of checkpoints."""

    rank: int = 0
    size: int = 1
    control: Any = None

    @property
    def first(self) -> bool:
        """True for rank 0, which writes the records and prints."""
        return self.rank == 0

    def gather(self, value: T, group: Any = None) -> list[T]:
        """The `value` of every process, in order of rank, by default within the run's timeout."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=group)
        return values

    def restarted(self) -> bool:
        """True if torchrun has restarted these processes after losing one; each machine counts only
        the restarts that its own caused."""
        return any(self.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))

    def by_first(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 and return its result, or raise its error, in all processes."""
        answer: Any = None
        with self.together():
            if self.first:
                answer = call()
        return self.gather(answer, self.control)[0]

    def in_turn(self, call: Callable[[], T]) -> T:
        """Run `call` in every process, in each machine's first one before the others, which then
        find its results, such as tokens, in the cache."""
        leads = self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        value: Any = None
        for turn in (True, False):
            with self.together():
                if leads is turn:
                    value = call()
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a body whose error in any process is raised in all; the first prints it."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as own:
            error = own
        line = error and (str(error) or type(error).__name__)
        failed = [one for one in self.gather(line, self.control) if one is not None]
        if failed and self.size > 1 and isinstance(error, ClearheadError | None):
            error = self.for_all(ClearheadError(failed[0]))
        if error is not None:
            raise error

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise a ClearheadError in all processes if any one's facts differ from rank 0's."""
        everyone = self.gather(facts, self.control)
        for rank, own in enumerate(everyone):
            for name, first, other in differences(everyone[0], own):
                raise self.for_all(
                    ClearheadError(
                        f"process {rank} has {name} {other!r}, and process 0 {first!r}: give "
                        "every process the same"
                    )
                )

    def for_all(self, error: ClearheadError) -> ClearheadError:
        """An error that all processes raise, and the first one prints."""
        error.printed_elsewhere = not self.first
        return error


ALONE = World()
_worlds: list[World] = []  # the one joined, where one is


@contextmanager
def joined(seconds: float, *, alone: bool = True) -> Iterator[World]:
    """Join torchrun's process group for the body; nested, a no-op. `seconds` is the timeout for
    waiting on another process; with `alone` a process that torchrun did not start joins none."""
    torchrun = not os.environ.keys().isdisjoint(("RANK", "WORLD_SIZE"))
    if _worlds or (alone and not torchrun and not dist.is_initialized()):
        yield _worlds[-1] if _worlds else ALONE
        return
    with ExitStack() as stack:
        if not dist.is_initialized():  # else by the caller, who ends it too
            _start(timedelta(seconds=seconds), alone=not torchrun)
            stack.callback(dist.destroy_process_group)
        control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        world = World(dist.get_rank(), dist.get_world_size(), control)
        _worlds.append(world)
        stack.callback(_worlds.pop)
        try:
            yield world
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            reason = first_line(error)
            try:
                dist.monitored_barrier(control, timedelta(seconds=5), wait_all_ranks=True)
            except RuntimeError as silence:  # it names the processes that do not answer
                reason = first_line(silence)
            raise ClearheadError(
                f"process {world.rank} of {world.size} gave up on another ({reason}): start the "
                "run again with --resume, or have torchrun do it: --max-restarts 3"
            ) from error


def _start(limit: timedelta, *, alone: bool) -> None:
    """Make the process group, of one process where it is alone."""
    gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        # The agent's store outlasts a restart, with the addresses of the processes that were killed
        # (pytorch/pytorch#135712). Several machines count restarts apart: docs/scale.md.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        place = " ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE"))
        raise ClearheadError(
            f"the process {place} cannot join the others within {limit.total_seconds():g} s "
            f"({first_line(error)}): start them all with torchrun, where they reach each other and "
            "have a GPU each"
        ) from error
