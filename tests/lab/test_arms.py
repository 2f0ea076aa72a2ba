"""What is compared: every preset with every combination, under names that stay."""

import string

import pytest

from clearhead.errors import ClearheadError
from clearhead.lab.configs import Arm, CompareConfig
from clearhead.train import TrainConfig


def test_presets_times_values_in_order():
    config = CompareConfig(
        presets=("transformer", "softmax1"),
        set={"norm": "rmsnorm-single"},
        vary={"train.optimizer": ("adamw", "orthoadam"), "num_hidden_layers": (2, 3)},
    )
    assert [arm.name for arm in config.arms] == [
        f"{preset} · {optimizer} · num_hidden_layers {layers}"
        for preset in ("transformer", "softmax1")
        for optimizer in ("adamw", "orthoadam")
        for layers in (2, 3)
    ]
    last = config.arms[-1]
    assert last.changes == {"train.optimizer": "orthoadam", "num_hidden_layers": 3}
    assert last.model == {"norm": "rmsnorm-single", "num_hidden_layers": 3}
    assert last.train.optimizer == "orthoadam"
    assert last.folder == "softmax1+orthoadam+num_hidden_layers=3"


def test_folders_are_safe_and_apart():
    names = ["a · b", "a+b", "a b", "a=b", "a/b", "a\\b", "x" * 200, "x" * 201, "é", ".."]
    folders = [
        Arm(name=name, preset="a", changes={}, model={}, train=TrainConfig()).folder
        for name in names
    ]
    allowed = set(string.ascii_letters + string.digits + "._+=-")
    assert all(set(folder) <= allowed and len(folder) <= 120 for folder in folders)
    lossless = {"a · b": "a+b", "a b": "a=b"}
    assert folders[0] == lossless["a · b"]
    # No preset or value has a + or = of its own, so these four never meet.
    distinct = [f for n, f in zip(names, folders, strict=True) if n not in ("a+b", "a=b")]
    assert len({*distinct}) == len(distinct)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vary": {"optimizer": ("sgd",)}}, "did you mean train.optimizer"),
        ({"vary": {"normaliser": ("softmax",)}}, "did you mean normalizer"),
        ({"vary": {"train.optimizer": ("adamv",)}}, "did you mean adamw"),
        ({"vary": {"hidden_size": (1.5,)}}, "hidden_size is 1.5: give a whole number"),
        ({"vary": {"train.seed": (0, 1)}}, "unknown key to vary 'train.seed'"),
        ({"set": {"nrm": "rmsnorm"}}, "did you mean norm"),
        ({"vary": {"train.rotation": ("haar",)}}, "adamw does not read it"),
        ({"measure_every": 2.5}, "measure_every is 2.5: give a number from 0 to below 1"),
    ],
)
def test_refusals_say_what_would_work(changes, message):
    with pytest.raises(ClearheadError, match=message.replace("*", r"\*")) as caught:
        CompareConfig(presets=("transformer", "softmax1"), **changes).check()
    assert "\n" not in str(caught.value)
