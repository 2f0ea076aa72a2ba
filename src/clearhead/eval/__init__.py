"""How well a model does: perplexity at the length it was trained on and beyond; multiple choice."""

from clearhead.eval.choices import Accuracy, Question, accuracy, load_questions
from clearhead.eval.likelihood import Perplexity, lengths, perplexity

__all__ = [
    "Accuracy",
    "Perplexity",
    "Question",
    "accuracy",
    "lengths",
    "load_questions",
    "perplexity",
]
