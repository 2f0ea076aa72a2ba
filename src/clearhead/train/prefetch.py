"""Batches of a step, prepared while the step before it runs."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self

import torch

MicroBatches = list[dict[str, torch.Tensor]]


class Prefetcher:
    """The micro-batches of consecutive steps, each prepared by a thread, one step ahead.

    For a CUDA device they are in pinned memory, from where copies to it need not be waited for. An
    error in the thread is raised where its step is taken. At exit the thread has ended.

    Args:
        prepare: makes the micro-batches of a step.
        steps: the steps to come.
        device: where the micro-batches will go.

    Attributes:
        waited: seconds for which `take` has kept training waiting.
    """

    def __init__(
        self, prepare: Callable[[int], MicroBatches], steps: range, device: torch.device
    ) -> None:
        self.waited = 0.0
        self._prepare, self._steps, self._pins = prepare, iter(steps), device.type == "cuda"
        # A thread begins on the first GPU, and pinning would open a context there.
        start = partial(torch.cuda.set_device, device) if self._pins else None
        self._thread = ThreadPoolExecutor(1, "prefetch", start)

    def __enter__(self) -> Self:
        self._next = self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self) -> MicroBatches:
        """The micro-batches of the next step; those of the step after it are begun."""
        began = time.perf_counter()
        batches = self._next.result() if self._next else []
        self.waited += time.perf_counter() - began
        self._next = self._begin()
        return batches

    def _begin(self) -> Future[MicroBatches] | None:
        step = next(self._steps, None)
        return None if step is None else self._thread.submit(self._pinned, step)

    def _pinned(self, step: int) -> MicroBatches:
        batches = self._prepare(step)
        if not self._pins:
            return batches
        return [{key: tensor.pin_memory() for key, tensor in batch.items()} for batch in batches]
