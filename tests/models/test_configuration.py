"""The configuration refuses what it cannot build, in one line that says what to change."""

import math
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from clearhead import ClearheadConfig, ClearheadError, ClearheadForCausalLM
from clearhead.models import PRESETS, SIZES, plan, preset
from clearhead.named_models import SMALLER
from clearhead.nn import REGISTRY

from . import space

FLOATS = [key for key, hint in ClearheadConfig.settings().items() if "float" in str(hint)]
WITH = {  # what a key needs to be of effect
    "lambda_init": {"maps": "differential"},
    "value_gain": {"values": "reparametrised"},
    "mlp_skip_gain": {"mlp_gain": 1.0},
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 10**23], ids=str)
@pytest.mark.parametrize("key", FLOATS)
def test_no_number_leaves_float32(key, value):
    with pytest.raises(ClearheadError, match=f"{key} is .*: give .*number"):
        ClearheadConfig(**WITH.get(key, {}), **{key: value})


TINY = {"hidden_size": 36, "num_attention_heads": 9, "head_dim": 4}
TINY |= {"num_hidden_layers": 1, "vocab_size": 11}
OVERRIDES = [
    *({"maps": "differential"}, {"norm_eps": math.nan}, {"hiden_size": 64}),
    *({"num_attention_heads": "9"}, {"rope_parameters": {"rope_type": "dynamic-causal"}}),
    *({"shaping": "shaped", "scores": "coca"}, {"direction": "bidirectional"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("overrides")
    ClearheadForCausalLM(ClearheadConfig(**TINY)).save_pretrained(where)
    return where


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda keys: next(iter(keys)))
@pytest.mark.parametrize("kind", [ClearheadForCausalLM, AutoModelForCausalLM])
def test_overrides_are_refused_in_the_same_line(folder, kind, override):
    with pytest.raises(ClearheadError) as expected:
        ClearheadForCausalLM(ClearheadConfig(**TINY | override))
    with pytest.raises(ClearheadError) as error:
        kind.from_pretrained(folder, **override)
    assert str(error.value) == str(expected.value)


def test_overrides_that_fit_are_taken_and_what_follows_from_them_is_derived(folder):
    config = ClearheadConfig.from_pretrained(folder, num_key_value_heads=None, norm="layernorm")
    assert (config.num_key_value_heads, config.norm) == (9, "layernorm")
    model = ClearheadForCausalLM.from_pretrained(folder, dropout=0.5, dtype=torch.bfloat16)
    assert (model.config.dropout, model.dtype) == (0.5, torch.bfloat16)


def test_a_configuration_changed_after_it_was_made_is_checked_before_a_model_is_built(folder):
    config = ClearheadConfig(**TINY)
    config.maps = "differential"
    with pytest.raises(ClearheadError, match="num_attention_heads=9 is odd"):
        ClearheadForCausalLM(config)
    with pytest.raises(ClearheadError, match="norm is of the configuration: set it there"):
        ClearheadForCausalLM.from_pretrained(folder, config=ClearheadConfig(**TINY), norm="none")


SET = {
    "attention_dropout": 0.1,
    "my_note": {"of": ["a", "list"]},
    "my_function": test_overrides_that_fit_are_taken_and_what_follows_from_them_is_derived,
    "my_lock": threading.Lock(),
    "layer_norm_eps": None,
}


@pytest.mark.parametrize("key", SET)
def test_a_model_opens_again_whatever_has_been_set_on_its_configuration(key, tmp_path):
    model = ClearheadForCausalLM(ClearheadConfig(**TINY))
    setattr(model.config, key, SET[key])
    with pytest.warns(UserWarning, match=rf"not saved, .*: config\.{key}$"):
        model.save_pretrained(tmp_path)
    assert getattr(model.config, key) == SET[key]
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path).config, key)
    assert ClearheadConfig.from_dict(model.config.to_dict()).to_dict() == model.config.to_dict()


@pytest.mark.parametrize(("key", "value"), [("maps", "differential"), ("dropout", "much")])
def test_a_value_with_which_a_model_would_not_open_is_refused_at_saving(key, value, tmp_path):
    model = ClearheadForCausalLM(ClearheadConfig(**TINY))
    setattr(model.config, key, value)
    with pytest.raises(ClearheadError, match=key if key == "dropout" else "is odd"):
        model.save_pretrained(tmp_path)


def test_unknown_presets_and_sizes_name_the_near_misses():
    with pytest.raises(ClearheadError, match="did you mean differential"):
        preset("diferential")
    with pytest.raises(ClearheadError, match="did you mean tiny"):
        preset("transformer", "tinny")
    with pytest.raises(ClearheadError, match=r"preset .differential. at size .tiny..*is odd"):
        preset("differential", num_attention_heads=3, head_dim=32)


SHAPES = {
    "tiny": {},
    "small": {},
    "narrow": {"hidden_size": 64, "num_attention_heads": 2},
    "wide": {"hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16},
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "relu": {"mlp": "relu", "bias": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_presets_are_matched_to_the_baseline_within_one_percent_or_claim_fewer(shape):
    size, keys = (shape, {}) if shape in SIZES else ("tiny", SHAPES[shape])
    baseline = plan(preset("transformer", size, **keys)).parameters
    for name in PRESETS if shape in SIZES else set(PRESETS) - set(SMALLER):
        share = plan(preset(name, size, **keys)).parameters / baseline
        if name not in SMALLER:
            assert abs(share - 1) < 0.01, name
        else:  # they claim to need fewer; clearhead's gate takes some of them back
            assert share < (0.98 if name == "clearhead" else 0.95), name


def test_a_width_that_is_given_is_kept_and_named_sizes_keep_the_widths_of_their_records():
    assert preset("differential-v2", intermediate_size=512).intermediate_size == 512
    widths = {"gpt2": (736, 2016), "differential-v2": (448, 1200), "gated": (448, 1208)}
    widths |= {"coca": (544, 1464), "coca-strict": (576, 1544), "xsa": (512, 1376)}
    for name, known in widths.items():
        assert tuple(preset(name, size).intermediate_size for size in ("tiny", "small")) == known


@pytest.mark.parametrize("name", space.CAUSAL)
def test_a_plan_counts_the_numbers_that_a_cache_holds(name):
    model = space.displaced(preset(name, **space.WHOLE))
    layers = model(space.ids(2, 15)).past_key_values.layers
    held = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    assert plan(model.config).cache_bytes == 2 * held // (2 * 15)


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


def test_the_documentation_has_the_table_of_the_declarations():
    """`python -c "from clearhead.nn import REGISTRY; print(REGISTRY.table())"` prints it."""
    page = Path(__file__).parents[2].joinpath("docs", "mechanisms.md").read_text("utf-8")
    assert REGISTRY.table() in page


def test_the_table_of_what_fits():
    """15 places to compare and count from, times 4 normalizers, times 3 kinds of maps; and with
    dot products a key bias from 8 places, a learned key and value from 7."""
    points = [point for place in space.attentions().values() for point in place]
    assert len(points) == 15 * 12 + 8 * 3 + 7 * 3
    for point in points:
        both_ways = space.config(direction="bidirectional", **point)
        assert (both_ways is None) == (point["position"] in ("alibi", "forget", "xpos"))


def test_a_saved_model_that_says_collinear_is_coca(tmp_path):
    layers = [{}, {"scores": "coca-slack"}]
    config = ClearheadConfig(scores="coca", num_hidden_layers=2, layer_overrides=layers)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"coca', '"collinear'))
    read = ClearheadConfig.from_pretrained(tmp_path)
    assert (read.scores, read.layer_overrides) == ("coca", layers)


FULL = {"sliding_window": None, "layer_types": None}
HYBRID = space.SHAPE | {"num_hidden_layers": 4, "sliding_window": 4}
HYBRID |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}


def test_a_plan_counts_what_is_seen_and_what_is_held():
    model = ClearheadForCausalLM(ClearheadConfig(**HYBRID))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(space.ids(1, 15), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    hybrid, full = (plan(ClearheadConfig(**keys), length=15) for keys in (HYBRID, HYBRID | FULL))
    assert hybrid.cache_bytes * 15 == 2 * held
    assert hybrid.cache_bytes == full.cache_bytes * (15 + 3 * 3) / 60
    # 15 tokens see 120 keys, by windows of 4 only 54.
    assert full.forward_flops - hybrid.forward_flops == pytest.approx(3 * 4 * 32 * (120 - 54) / 15)
    assert hybrid.parameters == full.parameters


def test_layers_are_described_as_they_are(tmp_path):
    overrides = [{}, {}, {}, {"position": "none"}]
    ClearheadConfig(**HYBRID, layer_overrides=overrides).save_pretrained(tmp_path)
    config = ClearheadConfig.from_pretrained(tmp_path)
    assert [config.layer(i).sliding_window for i in range(4)] == [4, 4, 4, None]
    assert [config.layer(i).position for i in range(4)] == ["rope"] * 3 + ["none"]
    assert config.layer_types == HYBRID["layer_types"]
    twelve = ClearheadConfig(**HYBRID | {"num_hidden_layers": 12})
    assert twelve.layer_types == HYBRID["layer_types"] * 3


YARN = {"rope_type": "yarn", "factor": 2.0}
POPE, SOFTPICK = {"scores": "pope"}, {"normalizer": "softpick"}
# By what they change, of the defaults or of a small shape.
DEFAULTS = [
    ({"maps": "diferential"}, "did you mean differential"),
    ({"normalizer": "relu"}, "choose one of key, key-value, sink, softmax, softmax1"),
    ({"hiden_size": 64}, "unknown configuration key 'hiden_size': did you mean hidden_size"),
    ({"frobnicate": 1}, "would have no effect"),
    ({"maps": "differential", "num_attention_heads": 3}, "num_attention_heads=3 is odd"),
    ({"maps": "differential", "num_key_value_heads": 3}, "num_key_value_heads=3 is odd"),
    ({"maps": "differential", "lambda_init": 1.5}, "between 0 and 1"),
    ({"lambda_init": 0.8}, "lambda_init=0.8 has no effect with maps='single'"),
    ({"head_norm": "none"}, "head_norm='none' has no effect with maps='single'"),
    ({"maps": "differential", "head_norm": "layer"}, "none of affine, plain, none"),
    ({"position": "alibi", "max_position_embeddings": 100_000}, "two digits"),
    ({"position": "xpos", "max_position_embeddings": 100_000}, "leave float32"),
    ({"position": "alibi", "scores": "coca"}, "rotates nothing"),
    ({"position": "alibi", "shaping": "shaped"}, "choose position='rope'"),
    ({"position": "xpos", "rope_parameters": YARN}, "not defined for it"),
    ({"rope_parameters": space.LLAMA3 | {"low_freq_factor": 4}}, "below high_freq_factor"),
    ({"head_dim": 7}, "head_dim=7 is odd"),
    ({"num_key_value_heads": 4}, "does not divide"),
    ({"position": "none", "rope_parameters": {"rope_theta": 5.0}}, "have no effect"),
    ({"rope_parameters": {"rope_type": "ntk"}}, "is none of default, linear"),
    ({"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
    ({"rope_parameters": {"factor": 2.0}}, "factor in rope_parameters has no effect"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
    ({"rope_parameters": {"rope_theta": 0}}, "not above 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0: give a whole number of at least 1"),
    ({"num_attention_heads": "6"}, "num_attention_heads is '6': give"),
    ({"hidden_size": 100}, "num_attention_heads=6 does not divide hidden_size=100"),
    ({"maps": "differential", "lambda_init": "high"}, "lambda_init is 'high': give"),
    ({"rope_parameters": YARN | {"beta_fast": "a"}}, "beta_fast='a' .* must be a finite number"),
    ({"norm_eps": 0.0}, "norm_eps is 0.0: give a finite number above 0"),
    ({"embedding_norm": "layernrom"}, "did you mean layernorm"),
    ({"dropout": 1.0}, "from 0 to below 1"),
    ({"mlp_gain": "dpth"}, "did you mean depth"),
    ({"values": "reparametrised", "value_gain": 0.0}, "other than 0"),
    ({"attention_skip": "none", "attention_gain": 0.0}, "write nothing at the start"),
    ({"mlp_skip_gain": 0.0, "mlp_gain": 0.0}, "write nothing at the start"),
    ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta=nan .* finite number"),
    ({"rope_parameters": {"rope_theta": 1e-300}}, "frequencies beyond float32"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 10**400}}, "finite number"),
    ({"head_dim": 2, "rope_parameters": YARN | {"rope_type": "dynamic"}}, "head_dim above 2"),
    ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta=1.0 is not above 1"),
    ({"rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "=0 .* at least 1"),
    ({"rope_parameters": YARN | {"attention_factor": math.nan}}, "attention_factor=nan"),
]
SMALL = [
    ({"values": "identity", "num_value_heads": 2}, "cannot share 2 values: leave num"),
    ({"shaping": "shaped", "num_value_heads": 2}, "only keys are shared"),
    ({"num_value_heads": 3}, "neither one for each of the 2 key heads"),
    ({"values": "identity", "head_dim": 8}, "32 channels are not the stream's 16"),
    ({"shaping": "shaped", "scores": "coca"}, "give query_range=0.02"),
    ({"shaping": "skipinit", "scores": "coca-slack"}, "no gradient ever moves"),
    ({"shaping": "shaped", "scores": "coca", "query_range": 0.0}, "query_range"),
    ({"scores": "coca", "query_range": 0.0}, "no gradient at query_range=0"),
    ({"query_range": -1.0}, "at least 0"),
    ({"shaping": "shaped", "maps": "differential"}, "choose head_norm='none'"),
    ({"order": "parallel", "attention_skip": "none"}, "one skip is around both"),
    ({"order": "parallel", "mlp_skip_gain": 1.0}, "no skip of its own"),
    ({"mlp_skip": "none", "mlp_skip_gain": 1.0}, "no skip to scale"),
    ({"value_gain": 0.2}, "value_gain=0.2 has no effect with values='linear'"),
    ({"value_init": "orthgonal"}, "is none of normal, orthogonal, identity"),
    ({"qk_norm": "rmsnorm", "shaping": "shaped"}, "1/eps"),
    ({"epilogue": "xsa", "shaping": "shaped"}, "choose shaping='none'"),
    ({"epilogue": "xsa", "attention_skip": "none"}, "choose attention_skip='identity'"),
    ({"normalizer": "key", "scores": "coca"}, "choose scores='dot'"),
    ({"normalizer": "key-value", "scores": "coca"}, "choose scores='dot'"),
    ({"normalizer": "key-value", "shaping": "shaped"}, "choose shaping='none'"),
    ({"prefix_length": 2}, "choose 'key-value'"),
    ({"normalizer": "key-value", "prefix_length": 0}, "prefix_length is 0: give"),
    ({"mlp_rotation": "hadamard", "intermediate_size": 25}, "intermediate_size=25 is odd"),
    ({"sliding_window": 1}, "a whole number of at least 2"),
    ({"layer_types": ["sliding_attention"]}, "without a sliding_window"),
    (
        {"values": "identity", "projections": "identity", "value_init": "orthogonal"},
        "value_init has no effect",
    ),
    ({"sliding_window": 4, "layer_types": ["full_attention"]}, "has no effect"),
    ({"sliding_window": 4, "layer_types": ["sliding_attentoin"]}, "did you mean sliding_att"),
    (
        {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3},
        "has 3 entries: give a number that divides",
    ),
    ({"sliding_window": 4, "direction": "bidirectional"}, "choose direction='causal'"),
    ({"layer_overrides": [{"direction": "bidirectional"}]}, "unknown axis of layer_overrides"),
    ({"layer_overrides": [{"position": "learned"}]}, "added before any layer"),
    ({"layer_overrides": ["full"]}, "give a mapping"),
    ({"position": "forget", "direction": "bidirectional"}, "raise the scores of later keys"),
    ({"position": "forget", "shaping": "shaped", "head_dim": 4}, "no paper states C"),
    ({"position": "forget", "normalizer": "key-value"}, "no token has a gate"),
    (POPE | {"position": "xpos"}, "choose position='rope'"),
    (POPE | {"shaping": "shaped", "head_dim": 4}, "above 0 at W_Q = 0"),
    (POPE | {"normalizer": "key"}, "choose scores='dot'"),
    (SOFTPICK | {"shaping": "shaped", "head_dim": 4}, "no gradient moves them"),
    (SOFTPICK | {"query_range": 0.0}, "no gradient moves them"),
]
NARROW = space.SHAPE | {"head_dim": 4}


@pytest.mark.parametrize(
    ("keys", "message"), [*DEFAULTS, *((NARROW | keys, message) for keys, message in SMALL)]
)
def test_refusals(keys, message):
    with pytest.raises(ClearheadError, match=message) as error:
        ClearheadConfig(**keys)
    assert "\n" not in str(error.value)
