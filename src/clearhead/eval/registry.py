"""Every evaluation by name: one line each."""

from collections.abc import Mapping

from clearhead.eval.allocation import AllocationTask
from clearhead.eval.hallucination import HallucinationTask
from clearhead.eval.hidden import MaskedTask
from clearhead.eval.hits import HitsTask
from clearhead.eval.multiple import ChoicesTask
from clearhead.eval.needles import NeedlesTask
from clearhead.eval.passkey import PasskeyTask
from clearhead.eval.perplexities import PerplexityTask
from clearhead.eval.recall import RecallTask
from clearhead.eval.shots import ShotsTask
from clearhead.eval.task import Task

TASKS: Mapping[str, type[Task]] = {
    "perplexity": PerplexityTask,
    "passkey": PasskeyTask,
    "needles": NeedlesTask,
    "recall": RecallTask,
    "hits": HitsTask,
    "allocation": AllocationTask,
    "shots": ShotsTask,
    "masked": MaskedTask,
    "choices": ChoicesTask,
    "hallucination": HallucinationTask,
}
# Their texts are as long as they are: --lengths would have no effect.
WITHOUT_LENGTH = ("choices",)
