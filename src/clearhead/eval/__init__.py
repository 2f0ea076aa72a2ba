"""Evaluations: perplexity, retrieval, masked tokens, and tasks of lm-eval."""

from clearhead.eval.classification import METRICS as METRICS
from clearhead.eval.classification import predict as predict
from clearhead.eval.perplexity_task import masked_loss as masked_loss
from clearhead.eval.sliding import lengths as lengths
from clearhead.eval.sliding import perplexity as perplexity
from clearhead.measure.sweep import Subject as Subject
from clearhead.measure.sweep import Texts as Texts
