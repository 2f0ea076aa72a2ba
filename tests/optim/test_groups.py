from itertools import pairwise

import pytest
import torch
from torch import nn

from clearhead import ClearheadForCausalLM, preset
from clearhead.errors import ClearheadError
from clearhead.optim import SCHEDULES, build_optimizer, decay_groups, learning_rate
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
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for p in decaying["params"]}
    assert decayed == {"embedding.weight", "projection.weight", "experts"}
    assert decaying["weight_decay"] == 0.1
    kept = {names[id(p)] for p in still["params"]}
    assert kept == {"projection.bias", "norm.weight", "norm.bias", "lambda_q", "experts_bias"}
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


def make_config(steps, **overrides):
    settings = {"sequence_length": 2, "batch_size": 1, "learning_rate": 1.0, "warmup": 0.2}
    return TrainConfig(tokens=2 * steps, **{**settings, **overrides})


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "triangle"])
def test_it_warms_up_to_the_peak_and_never_rises_again(schedule):
    config = make_config(50, schedule=schedule)
    rates = [learning_rate(step, config) for step in range(config.steps)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("schedule", "half", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)]
)
def test_half_way_through_the_decay_and_in_the_last_step(schedule, half, last):
    config = make_config(50, schedule=schedule)
    assert [learning_rate(step, config) for step in (29, 49)] == pytest.approx([half, last])


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_no_warmup_and_nothing_but_warmup(warmup):
    config = make_config(4, warmup=warmup, schedule="linear", final_learning_rate=0.0)
    expected = [0.25, 0.5, 0.75, 1.0] if warmup else [0.75, 0.5, 0.25, 0.0]
    assert [learning_rate(step, config) for step in range(4)] == pytest.approx(expected)
    assert learning_rate(0, make_config(1, final_learning_rate=0.5)) == 0.5


def test_the_triangle_is_the_crammed_one():
    """triangle2: min(1/4 + x, 4 − 4x) of the share x of the budget that is used."""
    config = make_config(40, schedule="triangle", warmup=0.75, final_learning_rate=0.0)
    shares = [step / 40 for step in range(40)]
    expected = [min(0.25 + x, 4 - 4 * x) for x in shares]
    assert [learning_rate(step, config) for step in range(40)] == pytest.approx(expected)
    for warmup in (0.0, 1.0):
        assert learning_rate(0, make_config(4, schedule="triangle", warmup=warmup)) in (0.25, 1.0)
    # Steps beyond the plan have the rate of its end, which is the peak if all of it is warmup.
    plan = {"schedule": "triangle", "schedule_tokens": 2 * 4, "final_learning_rate": 0.1}
    for warmup, end in ((0.75, 0.1), (1.0, 1.0)):
        assert learning_rate(6, make_config(8, warmup=warmup, **plan)) == pytest.approx(end)


def test_a_triangle_over_a_ramp_is_straight_in_tokens():
    options = {"accumulation": 6, "ramp": 0.5, "schedule": "triangle", "warmup": 0.75}
    config = make_config(60, **options, final_learning_rate=0.0)
    rates = [learning_rate(step, config) for step in range(config.steps)]
    whole = config.tokens_before(config.steps)
    used = [config.tokens_before(step) / whole for step in range(len(rates))]
    assert rates == pytest.approx([min(0.25 + x, 4 - 4 * x) for x in used])
