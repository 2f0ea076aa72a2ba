"""Combinations of axes that are refused, each in a line that says what would work."""

import pytest

from clearhead import ClearheadConfig, ClearheadError

from . import space

SHAPE = space.SHAPE | {"head_dim": 4}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"values": "identity", "num_value_heads": 2},
            "cannot share 2 values: leave num",
        ),
        ({"shaping": "shaped", "num_value_heads": 2}, "only keys are shared"),
        ({"num_value_heads": 3}, "neither one for each of the 2 key heads"),
        ({"values": "identity", "head_dim": 8}, "32 channels are not the stream's 16"),
        ({"projections": "identity", "head_dim": 8}, "32 channels are not the stream's 16"),
        ({"shaping": "shaped", "scores": "coca"}, "give query_range=0.02"),
        ({"shaping": "skipinit", "scores": "coca-slack"}, "no gradient ever moves them"),
        ({"shaping": "shaped", "scores": "coca", "query_range": 0.0}, "query_range"),
        ({"scores": "coca", "query_range": 0.0}, "no gradient at query_range=0"),
        ({"query_range": -1.0}, "at least 0"),
        ({"shaping": "shaped", "maps": "differential"}, "choose head_norm='none'"),
        ({"order": "parallel", "attention_skip": "none"}, "one skip is around both"),
        ({"order": "parallel", "mlp_skip_gain": 1.0}, "no skip of its own"),
        ({"mlp_skip": "none", "mlp_skip_gain": 1.0}, "no skip to scale"),
        ({"mlp_gain": "deep"}, "did you mean depth"),
        ({"mlp_gain": True}, "mlp_gain is True: give"),
        ({"value_gain": 0.2}, "value_gain=0.2 has no effect with values='linear'"),
        (
            {"values": "identity", "projections": "identity", "value_init": "orthogonal"},
            "value_init has no effect",
        ),
        ({"value_init": "orthgonal"}, "is none of normal, orthogonal, identity"),
        ({"attention_dropout": 0.1, "shaping": "shaped"}, "carry the signal itself"),
        ({"qk_norm": "rmsnorm", "shaping": "shaped"}, "1/eps"),
        ({"epilogue": "xsa", "shaping": "shaped"}, "choose shaping='none'"),
        ({"epilogue": "xsa", "attention_skip": "none"}, "choose attention_skip='identity'"),
        ({"epilogue": "gates"}, "did you mean gate"),
        ({"normalizer": "key", "scores": "coca"}, "choose scores='dot'"),
        ({"normalizer": "key-value", "scores": "coca"}, "choose scores='dot'"),
        ({"normalizer": "key-value", "shaping": "shaped"}, "choose shaping='none'"),
        ({"prefix_length": 2}, "choose normalizer='key-value'"),
        (
            {"normalizer": "key-value", "prefix_length": 0},
            "prefix_length is 0: give",
        ),
        ({"mlp_rotation": "hadamard", "intermediate_size": 25}, "intermediate_size=25 is odd"),
        ({"mlp_rotation": "hadamar"}, "did you mean hadamard"),
        ({"sliding_window": 1}, "a whole number of at least 2"),
        ({"layer_types": ["sliding_attention"]}, "without a sliding_window"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "has no effect"),
        ({"sliding_window": 4, "layer_types": ["sliding_attentoin"]}, "did you mean sliding_att"),
        (
            {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
            | {"num_hidden_layers": 4},
            "whose length divides",
        ),
        ({"sliding_window": 4, "layer_types": []}, "whose length divides"),
        ({"sliding_window": 4, "direction": "bidirectional"}, "choose direction='causal'"),
        ({"layer_overrides": [{"direction": "bidirectional"}]}, "unknown axis of layer_overrides"),
        ({"layer_overrides": [{"map": "single"}]}, "did you mean maps"),
        ({"layer_overrides": [{"maps": "singles"}]}, "did you mean single"),
        ({"layer_overrides": [{"position": "learned"}]}, "added before any layer"),
        ({"layer_overrides": ["full"]}, "give a mapping"),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ClearheadError, match=message) as error:
        ClearheadConfig(**SHAPE | keys)
    assert "\n" not in str(error.value)
