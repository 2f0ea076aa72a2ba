"""How well a model does: perplexity, retrieval and attention, at its length and beyond."""

from clearhead.eval.documents import Texts
from clearhead.eval.likelihood import Perplexity, lengths, perplexity
from clearhead.eval.registry import TASKS
from clearhead.eval.task import Subject, Task

__all__ = ["TASKS", "Perplexity", "Subject", "Task", "Texts", "lengths", "perplexity"]
