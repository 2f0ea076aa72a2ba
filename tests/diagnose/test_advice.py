"""What is advised of which numbers, at the thresholds and on both sides of them."""

import pytest

from clearhead.diagnose.diagnosis import advise


def _measures(share: float, **more: float) -> list[dict]:
    lines = [
        {"metric": "first_token_argmax_share", "map": "softmax", "value": share},
        {"metric": "chance_floor", "value": 0.05},
        # Of a layer and of a head: no whole, and no ground for advice.
        {"metric": "first_token_argmax_share", "map": "softmax", "layer": 1, "value": 0.9},
        {"metric": "first_token_argmax_share", "map": "softmax", "head": 0, "value": 0.9},
    ]
    return lines + [{"metric": name, "map": "softmax", "value": v} for name, v in more.items()]


@pytest.mark.parametrize(("share", "said"), [(0.3, True), (0.29, False)])
def test_a_sink(share, said):
    found = advise(_measures(share), width=64, length=512)
    assert bool(found) == said
    if said:
        assert found[0]["finding"].startswith("the first token is a sink: 30% of all queries")
        assert "preset softmax1" in found[0]["advice"]
        assert found[0]["threshold"] == share
    lines = _measures(0.4)
    lines[1]["value"] = 0.09  # by chance: five times that is more
    assert advise(lines, width=64, length=512) == []


def test_a_rank_is_judged_by_what_its_texts_allow():
    """Texts of 65 tokens have a rank of 64 without their first, however wide the model is."""
    for rank, said in ((12.0, False), (1.0, True)):
        lines = [{"metric": "effective_rank_without_first", "layer": 3, "value": rank}]
        found = advise(lines, width=1024, length=65)
        assert bool(found) == said
        assert all("rank collapse" in one["finding"] for one in found)
    assert advise([{**lines[0], "value": 12.0}], width=1024, length=2048)


def test_a_model_with_a_null_key_is_not_told_to_take_one():
    first, floor, *_ = _measures(0.5)  # a null key of either map of a difference is one
    null = {"metric": "null_mass", "map": "map 1", "value": 0.2}
    difference = [first | {"map": "difference"}, floor, null]
    for lines in (_measures(0.46, null_mass=0.17), _measures(0.46, prefix_mass=0.17), difference):
        (found,) = advise(lines, width=64, length=512)
        assert "beside the null key" in found["finding"]
        assert "softmax1" not in found["advice"]
