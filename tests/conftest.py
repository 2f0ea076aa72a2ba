"""Shared by every test: a fixed seed, and one thread, so that tests can run side by side."""

import gc
import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

# Before transformers reads it: no test waits for a network that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Test folders are no packages: what several floors share is loaded by its path.
for _name in ("architectures", "chromium", "judge_server", "warm"):
    _spec = importlib.util.spec_from_file_location(
        f"tests_{_name}", Path(__file__).with_name(f"{_name}.py")
    )
    assert _spec is not None
    assert _spec.loader is not None
    _module = sys.modules[f"tests_{_name}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)

TESTS = Path(__file__).parent
# Files that take more than some seconds, the longest first: a file stays in one process, and none
# of these may come last. The others take two minutes together.
SLOW = (
    *("models/test_compiled.py", "train/test_processes.py", "cli/test_repair_tutorial.py"),
    *("attack", "report/test_browser.py", "cli/test_quantize.py", "cli/test_reproduce.py"),
    *("cli/test_verbs.py", "papers/test_smoke.py", "lab/test_processes.py"),
    *("train/test_resume.py", "train/test_compile.py"),
    *("cli/test_compare.py", "eval/test_harness.py", "models/test_formulas.py"),
    *("models/test_conventions.py", "models/test_sink_models.py"),
    *("models/test_caches.py", "ops/test_layouts.py", "cli", "data/test_corpus.py"),
    *("data/test_synthetic.py", "models/test_checkpoints.py"),
    *("models/test_serving.py", "report/test_committed_records.py", "view/test_browser.py"),
    "eval/test_retrieval.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give files to processes in the order of collection, not by how many tests they have."""
    config.option.loadscopereorder = False


def pytest_xdist_auto_num_workers() -> int:
    """A process more than cores: some tests wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


def _rank(item: pytest.Item) -> int:
    ranks = (rank for rank, slow in enumerate(SLOW) if item.path.is_relative_to(TESTS / slow))
    return next(ranks, len(SLOW))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, longest files first; without a GPU leave its tests out."""
    items.sort(key=_rank)
    for item in items:
        if _rank(item) < len(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what is there by now, which stays to the end, out of the search for garbage."""
    gc.freeze()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Chromium; tests that need it are skipped where it is missing and not required."""
    found = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium")
    if found is None:
        if os.environ.get("CLEARHEAD_REQUIRE_BROWSER") == "1":
            pytest.fail("Chromium is required here, and neither on the path nor named")
        pytest.skip("no Chromium on the path, and $CLEARHEAD_CHROMIUM is not set")
    return found


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A judge on loopback, without a proxy before it, offline mode, or pauses between tries."""
    from huggingface_hub import constants

    from clearhead.eval import hallucination as judges

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(judges, "PAUSE", 0.0)
    with closing(sys.modules["tests_judge_server"].JudgeServer()) as server:
        yield server


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts Python as a fork of a process that has imported the libraries."""
    with closing(sys.modules["tests_warm"].Warm(tmp_path_factory.mktemp("warm"))) as server:
        yield server


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts Python as a fork of a process that has imported all of clearhead too."""
    folder = tmp_path_factory.mktemp("ready")
    with closing(sys.modules["tests_warm"].Warm(folder, "clearhead")) as server:
        yield server


@pytest.fixture
def room() -> Callable[[int], AbstractContextManager[None]]:
    """room(bytes): within it no file of this process can grow beyond so many, as on a full disk."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
