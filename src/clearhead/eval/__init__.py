"""How well a model does: perplexity, hidden tokens, multiple choice, and answers to tasks."""

from clearhead.eval.choices import Accuracy, Question, accuracy, load_questions
from clearhead.eval.classification import METRICS, predict
from clearhead.eval.likelihood import Perplexity, lengths, perplexity
from clearhead.eval.masked import masked_loss

__all__ = [
    "METRICS",
    "Accuracy",
    "Perplexity",
    "Question",
    "accuracy",
    "lengths",
    "load_questions",
    "masked_loss",
    "perplexity",
    "predict",
]
