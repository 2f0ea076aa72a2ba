import pytest
import torch
from torch import nn

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
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
    """Tied ones once, and neither biases of experts nor what is frozen."""
    model = make_model()
    model.experts = nn.Parameter(torch.zeros(2, 3, 4))
    model.experts_bias = nn.Parameter(torch.zeros(2, 4))
    model.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    decaying, still = decay_groups(model, 0.1)
    assert {id(p) for p in decaying["params"]} == {
        id(model.embedding.weight),
        id(model.projection.weight),
        id(model.experts),
    }
    assert decaying["weight_decay"] == 0.1
    assert {id(p) for p in still["params"]} == {
        id(model.projection.bias),
        id(model.norm.weight),
        id(model.norm.bias),
        id(model.lambda_q),
        id(model.experts_bias),
    }
    assert still["weight_decay"] == 0.0
    assert len(decay_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1  # no empty group


@pytest.mark.parametrize("preset_name", ["key-bias", "key-value"])
def test_learned_keys_and_values_do_not_decay(preset_name):
    model = ClearheadForCausalLM(preset(preset_name, hidden_size=16, num_attention_heads=2))
    learned = {id(p) for name, p in model.named_parameters() if ".normalizer." in name}
    assert learned
    decaying, still = decay_groups(model, 0.1)
    assert learned <= {id(p) for p in still["params"]}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert {id(p) for p in decaying["params"]} == matrices


def kinds(optimizer):
    """What steps each parameter, by name."""
    return {
        name: (type(part).__name__, group.get("rotation"))
        for part in getattr(optimizer, "_parts", [optimizer])
        for group in part.param_groups
        for name in group["param_names"]
    }


def test_orthoadam_leaves_the_vocabulary_and_what_is_named_unrotated():
    model = make_model()
    model.other = nn.Linear(4, 4, bias=False)
    config = TrainConfig(optimizer="orthoadam", rotation="haar", adamw_patterns=("other*",), seed=3)
    optimizer = build_optimizer(model, config)
    found = kinds(optimizer)
    wrapped = nn.ModuleDict({"module": model})  # as DDP names it
    assert kinds(build_optimizer(wrapped, config))["module.other.weight"] == found["other.weight"]
    assert found["embedding.weight"] == ("OrthoAdam", "haar")
    assert found["projection.weight"] == ("OrthoAdam", "haar")
    assert found["other.weight"] == ("OrthoAdam", "none")
    assert {turn.seed for turns in optimizer._turns for turn in turns if turn} == {3}
    assert {group["share"] for group in optimizer.param_groups} == {"parameter"}
    shared = build_optimizer(model, TrainConfig(optimizer="orthoadam", rotation_share="size"))
    assert {group["share"] for group in shared.param_groups} == {"size"}


def test_muon_steps_hidden_matrices_only_and_adamw_the_rest():
    name = "muon"
    model = make_model()
    model.other = nn.Linear(4, 4, bias=False)
    config = TrainConfig(optimizer=name, adamw_patterns=("other*",))
    found = {key: kind for key, (kind, *_) in kinds(build_optimizer(model, config)).items()}
    assert found.pop("projection.weight").lower() == name
    assert set(found.values()) == {"AdamW"}
    assert set(found) == {key for key, _ in model.named_parameters()} - {"projection.weight"}
    with pytest.raises(ClearheadError, match=f"no matrix is left for {name}"):
        build_optimizer(model, TrainConfig(optimizer=name, adamw_patterns=("*",)))
    with pytest.raises(ClearheadError, match="decides no parameter: names are like"):
        build_optimizer(model, TrainConfig(optimizer=name, adamw_patterns=("othr*",)))


OPTIMIZERS = ["adamw", "orthoadam", "sgd", "rmsprop", "adafactor", "muon"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_at_the_rate_it_is_given(name):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, learning_rate=0.02))
    x, y = torch.randn(32, 5), torch.randn(32, 2)
    losses = []
    for step in range(30):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 29:
            before = [p.detach().clone() for p in model.parameters()]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
