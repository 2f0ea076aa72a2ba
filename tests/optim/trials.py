"""Small trials of OrthoAdam and AdamW on the same parameters and gradients."""

import torch
from torch import nn

from clearhead.optim import OrthoAdam

SHAPES = {"wide": (6, 10), "tall": (10, 6), "twin": (10, 6), "experts": (2, 4, 6), "gain": (6,)}
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    return {**named, "scale": nn.Parameter(torch.ones((), dtype=dtype))}


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(make, steps=5, parameters=None, first=0):
    parameters = parameters or make_parameters()
    optimizer = make(parameters.values())
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


def ortho(**options):
    return lambda parameters: OrthoAdam(parameters, **{**OPTIONS, **options})


def adamw(parameters):
    return torch.optim.AdamW(parameters, **OPTIONS, foreach=False)


def assert_same(ours, theirs, **tolerance):
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def distance(ours, theirs, name):
    return float((ours[name] - theirs[name]).detach().abs().max())
