"""The configuration refuses what it cannot build, in one line that says what to change."""

from pathlib import Path

import pytest

import clearhead
from clearhead import ClearheadConfig, ClearheadError
from clearhead.models import PRESETS, plan, preset
from clearhead.models.catalogue import SMALLER
from clearhead.nn import REGISTRY
from clearhead.spec import AXES


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"maps": "diferential"}, "did you mean differential"),
        ({"normalizer": "relu"}, "choose one of sink, softmax, softmax1"),
        ({"hiden_size": 64}, "unknown configuration key 'hiden_size': did you mean hidden_size"),
        ({"frobnicate": 1}, "would have no effect"),
        ({"maps": "differential", "num_attention_heads": 3}, "num_attention_heads=3 is odd"),
        (
            {"maps": "differential", "num_attention_heads": 6, "num_key_value_heads": 3},
            "num_key_value_heads=3 is odd",
        ),
        ({"maps": "differential", "lambda_init": 1.5}, "outside"),
        ({"lambda_init": 0.8}, "lambda_init has no effect with maps='single'"),
        ({"head_norm": "none"}, "head_norm has no effect with maps='single'"),
        ({"maps": "differential", "head_norm": "layer"}, "none of affine, plain, none"),
        ({"position": "alibi", "max_position_embeddings": 100_000}, "two digits"),
        ({"position": "xpos", "max_position_embeddings": 100_000}, "leave float32"),
        ({"position": "alibi", "scores": "collinear"}, "rotates nothing"),
        (
            {"position": "xpos", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "not defined for it",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                }
            },
            "below high_freq_factor",
        ),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"num_key_value_heads": 4}, "does not divide"),
        ({"position": "none", "rope_parameters": {"rope_theta": 5.0}}, "have no effect"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "is none of default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_parameters": {"factor": 2.0}}, "factor in rope_parameters has no effect"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_parameters": {"rope_theta": 0}}, "not above 0"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"hidden_size": 0}, "above 0"),
        ({"num_attention_heads": "6"}, "num_attention_heads is '6': give"),
        ({"hidden_size": 100}, "num_attention_heads=6 does not divide hidden_size=100"),
        ({"maps": "differential", "lambda_init": "high"}, "lambda_init is 'high': give"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "a"}},
            "beta_fast='a' in rope_parameters must be a number",
        ),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"embedding_norm": "layernrom"}, "did you mean layernorm"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"attention_dropout": 0.1}, "no number is left out of attention maps"),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ClearheadError, match=message) as error:
        ClearheadConfig(**keys)
    assert "\n" not in str(error.value)


def test_unknown_presets_and_sizes_name_the_near_misses():
    with pytest.raises(ClearheadError, match="did you mean differential"):
        preset("diferential")
    with pytest.raises(ClearheadError, match="did you mean tiny"):
        preset("transformer", "tinny")
    with pytest.raises(ClearheadError, match=r"preset .differential. at size .tiny..*is odd"):
        preset("differential", num_attention_heads=3, head_dim=32)


@pytest.mark.parametrize("size", ["tiny", "small"])  # the others are papers' own shapes
def test_presets_are_matched_to_the_baseline_within_one_percent(size):
    baseline = plan(preset("transformer", size)).parameters
    for name in SMALLER:
        assert plan(preset(name, size)).parameters < 0.95 * baseline
    for name in set(PRESETS) - set(SMALLER):
        assert abs(plan(preset(name, size)).parameters / baseline - 1) < 0.01, name


@pytest.mark.parametrize("name", PRESETS)
def test_another_shape_derives_its_mlp_again(name):
    config = preset(name, hidden_size=64, num_attention_heads=2)
    assert config.intermediate_size == (256 if name == "gpt2" else 192)


def test_plan_by_hand():
    """d = 192, 4 layers, FFN 512, 4096 tied tokens; T = 256."""
    found = plan(preset("transformer", "tiny"))
    layer = 4 * 192**2 + 3 * 192 * 512
    assert found.non_embedding_parameters == 4 * (layer + 2 * 192) + 192
    assert found.parameters == found.non_embedding_parameters + 4096 * 192
    rotation, attention = 3 * 32 * 12, 4 * 192 * 257 / 2
    assert found.forward_flops == 2 * (4 * layer + 4096 * 192) + 4 * (rotation + attention)
    assert found.cache_bytes == 4 * 2 * 2 * 192
    assert plan(preset("bert")).cache_bytes == 0
    untied = plan(preset("transformer", "tiny", tie_word_embeddings=False))
    assert untied.parameters == found.parameters + 4096 * 192
    assert untied.non_embedding_parameters == found.non_embedding_parameters


def test_every_axis_is_declared_and_every_value_builds():
    for axis in AXES:
        gains = {"mlp_gain": 0.1} if axis == "residual_scale" else {}
        for name in REGISTRY.names(axis):
            config = ClearheadConfig(**{axis: name, **gains})
            assert getattr(config.layer(1), axis) == name


def test_the_documentation_lists_every_value():
    page = Path(__file__).parents[2].joinpath("docs", "mechanisms.md").read_text("utf-8")
    for axis in AXES:
        for name in REGISTRY.names(axis):
            assert f"| `{axis}` | `{name}` |" in page


def test_names_that_stay():
    heads = ("ClearheadForCausalLM", "ClearheadForMaskedLM", "ClearheadForSequenceClassification")
    for name in ("ClearheadConfig", *heads, "preset", "presets"):
        assert hasattr(clearhead, name)
    assert set(clearhead.presets()) == set(PRESETS)
    assert callable(clearhead.ops.attend)
    with pytest.raises(AttributeError):
        clearhead.nothing  # noqa: B018
