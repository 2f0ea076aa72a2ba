"""Configurations that are refused, each in a line that says what would work."""

import math

import pytest

from clearhead import ClearheadConfig, ClearheadError

from . import space

YARN = {"rope_type": "yarn", "factor": 2.0}
POPE, SOFTPICK = {"scores": "pope"}, {"normalizer": "softpick"}
# By what they change, of the defaults or of a small shape.
DEFAULTS = [
    ({"maps": "diferential"}, "did you mean differential"),
    ({"normalizer": "relu"}, "choose one of key, key-value, sink, softmax, softmax1"),
    ({"hiden_size": 64}, "unknown configuration key 'hiden_size': did you mean hidden_size"),
    ({"frobnicate": 1}, "would have no effect"),
    ({"maps": "differential", "num_attention_heads": 3}, "num_attention_heads=3 is odd"),
    (
        {"maps": "differential", "num_attention_heads": 6, "num_key_value_heads": 3},
        "num_key_value_heads=3 is odd",
    ),
    ({"maps": "differential", "lambda_init": 1.5}, "between 0 and 1"),
    ({"lambda_init": 0.8}, "lambda_init=0.8 has no effect with maps='single'"),
    ({"head_norm": "none"}, "head_norm='none' has no effect with maps='single'"),
    ({"maps": "differential", "head_norm": "layer"}, "none of affine, plain, none"),
    ({"position": "alibi", "max_position_embeddings": 100_000}, "two digits"),
    ({"position": "xpos", "max_position_embeddings": 100_000}, "leave float32"),
    ({"position": "alibi", "scores": "coca"}, "rotates nothing"),
    ({"position": "alibi", "shaping": "shaped"}, "choose position='rope'"),
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
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0: give a whole number of at least 1"),
    ({"num_attention_heads": "6"}, "num_attention_heads is '6': give"),
    ({"hidden_size": 100}, "num_attention_heads=6 does not divide hidden_size=100"),
    ({"maps": "differential", "lambda_init": "high"}, "lambda_init is 'high': give"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "a"}},
        "beta_fast='a' in rope_parameters must be a finite number",
    ),
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
    ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta=1.0 is not above 1"),
    (
        {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings=0 .* at least 1",
    ),
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
    ({"sliding_window": 4, "layer_types": ["full_attention"]}, "has no effect"),
    ({"sliding_window": 4, "layer_types": ["sliding_attentoin"]}, "did you mean sliding_att"),
    (
        {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3} | {"num_hidden_layers": 4},
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
SHAPE = space.SHAPE | {"head_dim": 4}


@pytest.mark.parametrize(
    ("keys", "message"), [*DEFAULTS, *((SHAPE | keys, message) for keys, message in SMALL)]
)
def test_refusals(keys, message):
    with pytest.raises(ClearheadError, match=message) as error:
        ClearheadConfig(**keys)
    assert "\n" not in str(error.value)
