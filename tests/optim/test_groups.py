import torch
from torch import nn

from clearhead.optim import build_optimizer, decay_groups
from clearhead.train import TrainConfig


def make_model():
    model = nn.Module()
    model.embedding = nn.Embedding(11, 4)
    model.projection = nn.Linear(4, 4)
    model.norm = nn.LayerNorm(4)
    model.lambda_q = nn.Parameter(torch.zeros(4))
    model.head = nn.Linear(4, 11, bias=False)
    model.head.weight = model.embedding.weight
    return model


def test_matrices_decay_and_nothing_else_does():
    model = make_model()
    decaying, still = decay_groups(model, 0.1)
    assert {id(p) for p in decaying["params"]} == {
        id(model.embedding.weight),
        id(model.projection.weight),
    }
    assert decaying["weight_decay"] == 0.1
    assert {id(p) for p in still["params"]} == {
        id(model.projection.bias),
        id(model.norm.weight),
        id(model.norm.bias),
        id(model.lambda_q),
    }
    assert still["weight_decay"] == 0.0


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    (group,) = decay_groups(model, 0.1)
    assert [p is model.weight for p in group["params"]] == [True]


def test_only_matrices_shrink_where_the_gradient_is_zero():
    model = make_model()
    nn.init.ones_(model.projection.bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, TrainConfig(learning_rate=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_the_fused_step_is_the_plain_one():
    config = TrainConfig(learning_rate=0.01)
    models = [make_model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.AdamW(
        decay_groups(models[1], config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        foreach=False,
    )
    optimizers = [build_optimizer(models[0], config), plain]
    assert optimizers[0].defaults["fused"]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(p.shape, generator=generator) for p in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
