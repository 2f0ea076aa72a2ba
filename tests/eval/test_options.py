"""Options of all tasks, refused before any model is loaded."""

import pytest

from clearhead import ClearheadError
from clearhead.eval.options import OPTIONS, JudgeConfig
from clearhead.lab.sweep_configs import EvaluateConfig


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("passkey", {"depths": (2.0,)}, "passkey.depths is .*2.0.*: give a fraction between 0 and"),
        ("passkey", {"trials": 0}, "passkey.trials is 0"),
        ("needles", {"depths": ()}, "depths are none: give at least one"),
        ("shots", {"counts": ()}, "counts are none"),
        ("shots", {"permutations": 0}, "shots.permutations is 0"),
        ("lm_eval", {"limit": 0}, "lm_eval.limit is 0"),
        ("lm_eval", {"shots": -1}, "lm_eval.shots is -1"),
        ("hallucination", {"judge": JudgeConfig(timeout=0.0)}, "judge.timeout is 0.0: give a numb"),
    ],
)
def test_refuses_at_once_what_is_out_of_range(task, changes, message):
    with pytest.raises(ClearheadError, match=message):
        EvaluateConfig(models=("m",), **{task: OPTIONS[task](**changes)})
