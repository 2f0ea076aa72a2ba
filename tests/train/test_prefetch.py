"""Batches are prepared ahead by a thread that ends with the run, however the run ends."""

import threading
import time

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.train import Callback, train
from clearhead.train.prefetch import Prefetcher


@pytest.fixture
def threads():
    """Asserts that no thread is left of those that a test starts."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Recorder(Callback):
    """Keeps the metrics; raises an error after a step."""

    def __init__(self, error=None, at=None):
        self.metrics, self.error, self.at = [], error, at

    def step(self, metrics):
        self.metrics.append(metrics)
        if metrics.step == self.at:
            raise self.error


def test_a_batch_is_prepared_while_the_step_before_it_runs(tiny, tmp_path, threads):
    begun = {number: threading.Event() for number in range(13)}

    class Watched(tiny.Batches):
        def batch(self, step):
            begun[step].set()
            return super().batch(step)

    model, steps = tiny.make_model(), iter(range(1, 12))

    def in_step(module, inputs):
        following = next(steps, None)
        assert following is None or begun[following].wait(timeout=20)
        assert not begun[(following or 11) + 1].is_set()

    model.register_forward_pre_hook(in_step)
    result = train(model, Watched(), tiny.make_config(), output=tmp_path / "run")
    assert result.steps == 12


def test_an_error_is_raised_at_the_step_that_needs_the_batch(tiny, tmp_path, threads):
    class Broken(tiny.Batches):
        def batch(self, step):
            if step == 5:
                raise ClearheadError("the shard is gone: build it again")
            return super().batch(step)

    recorder = Recorder()
    with pytest.raises(ClearheadError, match="the shard is gone: build it again"):
        train(
            tiny.make_model(),
            Broken(),
            tiny.make_config(save_every=1),
            output=tmp_path / "run",
            callbacks=[recorder],
        )
    assert [line.step for line in recorder.metrics] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_in_a_step_leaves_no_thread(tiny, tmp_path, threads, error):
    recorder = Recorder(error, at=3)
    with pytest.raises(error):
        train(
            tiny.make_model(),
            tiny.Batches(),
            tiny.make_config(),
            output=tmp_path / "run",
            callbacks=[recorder],
        )


def test_only_the_time_that_training_waits_is_counted(threads):
    ready, sleeps = threading.Event(), iter([0.3, 0.3, 0])

    def prepare(step):
        time.sleep(next(sleeps))
        if step == 2:
            ready.set()
        return [step]

    with Prefetcher(prepare, range(1, 4), torch.device("cpu")) as prefetcher:
        assert prefetcher.take() == [1]
        waited = prefetcher.waited
        assert waited > 0.1
        assert ready.wait(20)
        assert prefetcher.take() == [2]
        assert prefetcher.waited - waited < 0.1


def test_the_share_of_waiting_is_recorded(tiny, tmp_path, threads):
    recorder = Recorder()
    train(
        tiny.make_model(), tiny.Batches(), tiny.make_config(), output=tmp_path, callbacks=[recorder]
    )
    assert all(0 <= line.batch_stall < 1 for line in recorder.metrics)
