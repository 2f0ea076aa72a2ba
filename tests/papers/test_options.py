"""Options of `clearhead reproduce` change the jobs of an experiment."""

from dataclasses import replace

import pytest

from clearhead.papers.requests import EXPERIMENTS, changed
from clearhead.papers.study import Study

# Option, its value, and the experiment, scale and arm whose jobs it changes.
OPTIONS = [
    ("seeds", (7,), "blocks", "tiny", "sas"),
    ("tokens", 8192, "blocks", "tiny", "sas"),
    ("data", ("own.txt",), "long-context", "paper", "alibi"),
    ("data", ("own.txt",), "signal", "tiny", "sas"),
    ("base", "own-model", "retrofit", "tiny", "prefix turned"),
    ("test_data", ("own.txt",), "retrofit", "tiny", "as it is"),
    ("test_data", ("own.txt",), "outliers", "tiny", "transformer"),
    ("questions", ("bits",), "retrofit", "tiny", "dense"),
]


def _configs(one: Study) -> list[object]:
    jobs = one.runs(next(iter(one.tries), None), one.seeds[0])
    return [job.config for job in (*jobs, *(job.after for job in jobs if job.after))]


@pytest.mark.parametrize(("option", "value", "study", "scale", "arm"), OPTIONS)
def test_an_option_changes_a_job(option, value, study, scale, arm):
    (one,) = (one for one in EXPERIMENTS[study].arms(scale) if one.name == arm)
    before = _configs(one)
    after = _configs(changed(one, **{option: value}))
    assert after != before
    said = str(after)
    for word in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
        assert option in ("seeds", "questions") or word in said


def test_own_text_takes_the_place_of_the_hubs_where_there_is_some():
    """Code is a question of its own, and stays."""
    one = next(EXPERIMENTS["retrofit"].arms("tiny"))
    asked = changed(one, test_data=("own.txt",)).questions
    assert asked["bits"].data == replace(one.questions["bits"].data, data=("own.txt",))
    assert asked["bits"].data.validation == 0.999
    assert asked["code"] == one.questions["code"]
