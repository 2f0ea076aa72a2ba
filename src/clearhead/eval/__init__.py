"""How well a model does: perplexity, retrieval, hidden tokens, multiple choice, and tasks."""

from clearhead.eval.classification import METRICS, predict
from clearhead.eval.documents import Texts
from clearhead.eval.harness_tasks import check_names
from clearhead.eval.items import Item, load_items
from clearhead.eval.likelihood import Perplexity, lengths, perplexity
from clearhead.eval.masked import masked_loss
from clearhead.eval.multiple import Accuracy, accuracy
from clearhead.eval.registry import TASKS, WITHOUT_LENGTH
from clearhead.eval.task import Subject, Task, parted

__all__ = [
    "METRICS",
    "TASKS",
    "WITHOUT_LENGTH",
    "Accuracy",
    "Item",
    "Perplexity",
    "Subject",
    "Task",
    "Texts",
    "accuracy",
    "check_names",
    "lengths",
    "load_items",
    "masked_loss",
    "parted",
    "perplexity",
    "predict",
]
