"""What the blocks' axes refuse, each in a line that says what would work."""

import pytest
import tests_models_space as space

from clearhead import ClearheadConfig, ClearheadError

SHAPE = space.SHAPE | {"head_dim": 4}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"values": "identity", "num_value_heads": 2}, "cannot share as 2: leave num_value_heads"),
        ({"shaping": "shaped", "num_value_heads": 2}, "only keys are shared"),
        ({"num_value_heads": 3}, "neither one for each of the 2 key heads"),
        ({"values": "identity", "head_dim": 8}, "32 channels are not the stream's 16"),
        ({"projections": "identity", "head_dim": 8}, "32 channels are not the stream's 16"),
        ({"shaping": "shaped", "scores": "collinear"}, "state query_range=0.02"),
        ({"shaping": "skipinit", "scores": "collinear-slack"}, "no gradient ever moves them"),
        ({"shaping": "shaped", "scores": "collinear", "query_range": 0.0}, "query_range"),
        ({"scores": "collinear", "query_range": 0.0}, "never leaves query_range=0"),
        ({"query_range": -1.0}, "at least 0"),
        ({"shaping": "shaped", "maps": "differential"}, "choose head_norm='none'"),
        ({"order": "parallel", "attention_skip": "none"}, "one skip passes by both"),
        ({"order": "parallel", "mlp_skip_gain": 1.0}, "MLP's own skip"),
        ({"mlp_skip": "none", "mlp_skip_gain": 1.0}, "no skip to scale"),
        ({"residual_scale": "feedback"}, "no branch has a gain to move"),
        (
            {"residual_scale": "scheduled", "attention_skip": "none", "attention_gain": 1.0},
            "would write nothing at the start",
        ),
        ({"mlp_gain": "deep"}, "give a number, or 'depth'"),
        ({"mlp_gain": True}, "mlp_gain is True: give"),
        ({"value_gain": 0.2}, "has no effect without a reparametrised matrix"),
        (
            {"values": "identity", "projections": "identity", "value_init": "orthogonal"},
            "value_init has no effect",
        ),
        ({"value_init": "orthgonal"}, "is none of normal, orthogonal, identity"),
        ({"attention_dropout": 0.1, "shaping": "shaped"}, "carry the signal itself"),
        ({"qk_norm": "rmsnorm", "shaping": "shaped"}, "1/eps"),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ClearheadError, match=message) as error:
        ClearheadConfig(**SHAPE | keys)
    assert "\n" not in str(error.value)
