"""Evaluation tasks by name."""

from collections.abc import Mapping

from clearhead.eval.hallucination import HallucinationTask
from clearhead.eval.harness import HarnessTask
from clearhead.eval.options import OPTIONS
from clearhead.eval.perplexity_task import HitsTask, MaskedTask, PerplexityTask
from clearhead.eval.retrieval import AllocationTask, NeedlesTask, PasskeyTask, RecallTask
from clearhead.eval.shots import ShotsTask
from clearhead.measure.sweep import Task

_CLASSES: tuple[type[Task], ...] = (
    *(PerplexityTask, PasskeyTask, NeedlesTask, RecallTask, HitsTask),
    *(AllocationTask, ShotsTask, MaskedTask, HarnessTask, HallucinationTask),
)
TASKS: Mapping[str, type[Task]] = dict(zip(OPTIONS, _CLASSES, strict=True))
"""Tasks of `clearhead eval` by name."""
