"""Evaluation tasks by name."""

from collections.abc import Mapping

from clearhead.eval.hallucination import HallucinationTask
from clearhead.eval.harness import HarnessTask
from clearhead.eval.perplexity_task import HitsTask, MaskedTask, PerplexityTask
from clearhead.eval.retrieval import AllocationTask, NeedlesTask, PasskeyTask, RecallTask
from clearhead.eval.shots import ShotsTask
from clearhead.measure.sweep import Task

TASKS: Mapping[str, type[Task]] = {
    "perplexity": PerplexityTask,
    "passkey": PasskeyTask,
    "needles": NeedlesTask,
    "recall": RecallTask,
    "hits": HitsTask,
    "allocation": AllocationTask,
    "shots": ShotsTask,
    "masked": MaskedTask,
    "lm_eval": HarnessTask,
    "hallucination": HallucinationTask,
}
"""Tasks of `clearhead eval` by name."""
WITHOUT_LENGTH = ("lm_eval",)
"""Tasks whose texts have a length of their own: `--lengths` would have no effect."""
