"""How well a model does: perplexity, at the length it was trained on and beyond."""

from clearhead.eval.likelihood import Perplexity, lengths, perplexity

__all__ = ["Perplexity", "lengths", "perplexity"]
