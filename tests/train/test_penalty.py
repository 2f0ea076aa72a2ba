"""The penalty on outliers among the inputs of linear layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.train import TrainConfig, train
from clearhead.train.parallel import accumulate
from clearhead.train.penalty import BEYOND, excess, penalised


def _with_outliers(batch=2, tokens=3, channels=400):
    x = torch.randn(batch, tokens, channels, dtype=torch.float64)
    x[0, 1, 5], x[1, 0, 7], x[1, 2, 9] = 40.0, -60.0, 35.0
    return x


def _by_hand(x):
    """P and its gradient, a number at a time."""
    found, gradient = [], torch.zeros_like(x)
    for text, of in zip(x, gradient, strict=True):
        r = math.sqrt(sum(value**2 for value in text.flatten().tolist()) / text.numel())
        total = 0.0
        for t, row in enumerate(text.tolist()):
            for c, value in enumerate(row):
                over = abs(value) / (BEYOND * r) - 1
                if over > 0:
                    total += over**2 / len(text)
                    of[t, c] = 2 * over * math.copysign(1, value) / (BEYOND * r) / len(text)
        found.append(total)
    return torch.tensor(found, dtype=x.dtype), gradient


def test_the_penalty_and_its_gradient_are_those_of_its_formula():
    x = _with_outliers().requires_grad_()
    found = excess(x)
    found.sum().backward()
    wanted, gradient = _by_hand(x.detach())
    assert (wanted > 0.01).all()
    assert (gradient != 0).sum() == 3  # the outliers alone
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=0)
    torch.testing.assert_close(excess(1e3 * x.detach()), wanted, rtol=1e-12, atol=0)
    assert excess(torch.zeros(1, 2, 3)).item() == 0.0


def _model(tiny):
    """With one channel of the last MLP's products far above the others."""
    model = tiny.make_model(attention_dropout=0.0, intermediate_size=256)
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight[3] *= 30
    return model.train()


def _gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_gradients_of_a_step_are_those_of_loss_and_penalty_together(tiny):
    model, batch = _model(tiny), tiny.Batches().batch(0)
    inputs = dict[str, torch.Tensor]()
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0]}))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    ]
    loss = model(**batch).loss
    for hook in hooks:
        hook.remove()
    wanted = torch.stack([excess(x).mean() for x in inputs.values()]).mean()
    (loss + 0.5 * wanted).backward()
    theirs = _gradients(model)
    model.zero_grad()
    rows = [{key: tensor[[row]] for key, tensor in batch.items()} for row in range(2)]
    with penalised(model, 0.5) as penalty:
        found = accumulate(model, rows, "fp32", penalty=penalty)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(_gradients(model), theirs, rtol=1e-3, atol=1e-6)
    assert wanted > 0.1
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_a_penalty_takes_outliers_away_and_none_leaves_the_run_as_it_was(tiny, tmp_path):
    ends = {}
    for weight in (0.0, 1.0):
        model, folder = _model(tiny), tmp_path / str(weight)
        config = replace(tiny.make_config(), optimizer="adamw", learning_rate=1e-2, penalty=weight)
        train(model, tiny.Batches(), config, output=folder)
        with torch.no_grad(), penalised(model, 1.0) as penalty, torch.enable_grad():
            model.train()(**tiny.Batches().batch(0))
            ends[weight] = penalty.take().item()
    assert ends[1.0] < 0.1 * ends[0.0]
    with penalised(model, 0.0) as penalty:
        assert penalty is None
        assert not any(layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize(
    "settings", [{"compile": "blocks"}, {"checkpointing": "blocks"}, {"parallel": "fsdp"}]
)
def test_a_penalty_is_refused_where_inputs_are_not_read_once(settings):
    with pytest.raises(ClearheadError, match="penalty reads every layer's inputs once"):
        TrainConfig(penalty=0.1, **settings)
