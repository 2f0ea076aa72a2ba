"""The papers' experiments, by name: each is a function in the file of its paper."""

from clearhead.reproduce import blocks, coca, differential, ours, softmax1
from clearhead.reproduce.study import Experiment

EXPERIMENTS = {
    one.name: one
    for paper in (differential, coca, blocks, softmax1, ours)
    for one in vars(paper).values()
    if isinstance(one, Experiment)
}
