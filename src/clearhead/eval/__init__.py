"""Evaluations: perplexity, retrieval, masked tokens, multiple choice, and tasks of lm-eval."""

from typing import TYPE_CHECKING

from clearhead.lazy import lazily

if TYPE_CHECKING:
    from clearhead.eval.choices import Questions, accuracy, load_questions
    from clearhead.eval.classification import METRICS, predict
    from clearhead.eval.harness_tasks import check_names
    from clearhead.eval.masked_lm import masked_loss
    from clearhead.eval.registry import TASKS, WITHOUT_LENGTH
    from clearhead.eval.task import Subject, parted
    from clearhead.eval.window_perplexity import Perplexity, lengths, perplexity
    from clearhead.measure.documents import Texts
    from clearhead.measure.task import Task

__all__ = [
    "METRICS",
    "TASKS",
    "WITHOUT_LENGTH",
    "Perplexity",
    "Questions",
    "Subject",
    "Task",
    "Texts",
    "accuracy",
    "check_names",
    "lengths",
    "load_questions",
    "masked_loss",
    "parted",
    "perplexity",
    "predict",
]

__getattr__ = lazily(__name__)
