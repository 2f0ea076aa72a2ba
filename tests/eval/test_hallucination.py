"""Contextual hallucination: texts by whole forward passes, words counted, judges that fail."""

import json
from dataclasses import replace

import pytest
import tests_judge_server as served

from clearhead import ClearheadError
from clearhead.eval.hallucination import HallucinationTask, grounding, names, verdicts
from clearhead.records.intervals import wilson
from clearhead.settings.eval import JudgeConfig

from .conftest import greedy, numbers

JUDGE = JudgeConfig(endpoint="http://127.0.0.1:1/v1", model="x")


@pytest.fixture
def task(tmp_path):
    """Six documents of unlike lengths, the last ones too long."""
    rows = [
        {
            "passage": f"{n} The old woman knew, and was silent. " * (1 + 5 * n),
            "short": f"Ann {n}",
            "none": " ",
        }
        for n in range(6)
    ]
    path = tmp_path / "stories.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = {"text_field": "passage", "label_field": "short"}
    return HallucinationTask(files=(str(path),), summary_tokens=9, **fields)


@pytest.fixture
def subject(make_subject):
    subject = make_subject(lengths=(192,))
    subject.model.double()
    return subject


def test_texts_and_measures_are_what_is_found_by_hand(subject, task):
    (cell,) = task.cells(subject)
    found = numbers(task.measure(subject, cell))
    rows, documents, prompts = task.asked(subject, cell)
    ids = [greedy(subject.model, prompt.ids, 9) for prompt in prompts]
    end = subject.tokenizer.eos_token_id
    written = [subject.decode([*one, end][: [*one, end].index(end)]).strip() for one in ids]
    assert found["texts"] == [text.partition("\n\n")[0].rstrip() for text in written]
    assert len(rows) == found["items"] == 6
    counts = grounding(found["texts"], documents)
    assert {key: found[key] for key in counts} == pytest.approx(counts)
    assert "accuracy" not in found
    for row, document, prompt in zip(rows, documents, prompts, strict=True):
        asked = subject.decode(prompt.ids)
        assert document in asked
        assert asked.endswith("\n\nSummary:")
        if document != row.text:  # one that is too long loses its end
            assert len(prompt.ids) == 192 - 9
            assert row.text.startswith(document)
    assert found["cut"] == sum(a.text != b for a, b in zip(rows, documents, strict=True)) / 6 > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ()}, "hallucination needs files"),
        ({"files": ("a/x.jsonl", "b/x.jsonl")}, "two files have one name"),
        ({"files": ("none.jsonl",)}, "no such file"),
        ({"summary_tokens": 190}, r"has no room for \d+ tokens of a prompt, 190 of a summary"),
        ({"text_field": "story"}, "no field 'story', it has .*--hallucination.text-field"),
        ({"label_field": "shorts"}, "name the one meant with --hallucination.label-field"),
        ({"text_field": "none"}, "line 1: document or summary is empty: give both"),
        ({"judge": JudgeConfig(endpoint="http://127.0.0.1:1/v1")}, "a judge needs a judge.model"),
        ({"judge": JudgeConfig(model="x", endpoint="file:///secret")}, "a URL without user and"),
        ({"judge": JudgeConfig(model="x", endpoint="http://me:secret@x/v1")}, "URL without user"),
        ({"judge": JudgeConfig(model="x", endpoint="http://x?key=secret")}, "URL without user"),
        ({"judge": replace(JUDGE, key_variable="NO_KEY")}, r"judge.key-variable: set \$NO_KEY"),
    ],
)
def test_refuses_at_once_what_cannot_be_measured(subject, task, changes, message):
    with pytest.raises(ClearheadError, match=message) as error:
        replace(task, **changes).cells(subject)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_names_are_counted():
    found = grounding(
        ["Then Ann saw the ship.", "A ship, and Tom"],
        ["Ann saw a ship in 1900.", "the Ship and Bea"],
    )
    assert found["unsupported_names"] == 1 / 2  # Tom of Ann, Tom
    assert found["names_above_chance"] == 1 - 1 / 2
    assert set(grounding([""], ["a b"]).values()) == {None}
    assert names("Tom met Ann, Bea's aunt. Later I'm at NASA (Paris) in May") == {
        *("ann", "bea", "nasa", "may")
    }


def test_a_judge_gives_the_accuracy(subject, task, judge):
    """By the reference's number: four supported, one not, one undecided."""
    replies = {"Ann 1": "Conclusion: False", "Ann 4": "who knows"}
    judge.answer = lambda prompt: served.completion(
        next((replies[name] for name in replies if name in prompt), "**Conclusion: True**")
    )
    task = replace(task, judge=JudgeConfig(endpoint=judge.url, model="gpt-x"))
    (cell,) = task.cells(subject)
    assert cell["judge"] == "gpt-x"
    found = numbers(task.measure(subject, cell))
    assert found["accuracy"] == 4 / 5
    assert (found["low"], found["high"]) == wilson(4, 5)
    assert (found["undecided"], found["unjudged"], found["items"]) == (1, 0, 6)
    assert found["judge_failures"] == []
    rows, documents, _ = task.asked(subject, cell)
    given = zip(judge.prompts, rows, documents, found["texts"], strict=True)
    for asked, row, document, text in given:
        assert all(x in asked for x in (document, row.label, f"Proposed text:\n{text}\n"))


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It says so.\nConclusion: True", True),
        ("It does not.\n\n**Conclusion: False**\n", False),
        ("**Conclusion:** true.", True),
        ("  _CONCLUSION_ : `False`  \nmore", False),
        ("Conclusion: True\nso\nConclusion: True", True),
        ("Conclusion: True\nConclusion: False", None),
        ("My conclusion: True", None),
        ("Conclusion:\nTrue", None),
        (None, None),  # as when all tokens went into thought
    ],
)
def test_a_conclusion_is_read_strictly(judge, reply, verdict):
    judge.answer = lambda prompt: served.completion(reply)
    found = _ask(judge)
    assert found.get("accuracy") == verdict
    assert (found["undecided"], found["unjudged"]) == (int(verdict is None), 0)


def _ask(server, *prompts, **changes):
    config = JudgeConfig(endpoint=server.url, model="gpt-x", **changes)
    return verdicts(config, prompts or ["one"])


def test_a_server_is_asked_at_temperature_0_with_its_key(judge, monkeypatch):
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")  # is the hub's
    judge.answer = lambda prompt: served.completion(f"{prompt} to sk-secret", model="x sk-secret")
    found = _ask(judge, "one", "two é", key_variable="MY_KEY", new_tokens=7)
    assert found["replies"] == ["one to [key]", "two é to [key]"]
    _ask(judge, "three")
    (path, first, body), _, (_, last, _) = judge.requests
    assert path == "/v1/chat/completions"
    headers = [{key.lower(): value for key, value in one.items()} for one in (first, last)]
    assert [one["authorization"] for one in headers] == ["Bearer sk-secret", "Bearer none"]
    wanted = {"model": "gpt-x", "temperature": 0, "max_tokens": 7}
    assert {key: body[key] for key in wanted} == wanted
    assert body["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"error": {"message": "no sk-secret"}}, {}),
        (500, b"out of\nmemory", {}),
        (200, {"choices": []}, {}),
        served.completion(float("nan")),
    ],
)
def test_what_a_server_does_wrong_is_counted_and_named(judge, monkeypatch, answer):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge.answer = lambda prompt: answer
    found = _ask(judge, key_variable="MY_KEY")
    assert (found["unjudged"], found["replies"]) == (1, [None])
    (failure,) = found["judge_failures"]
    assert "sk-secret" not in failure
    assert "\n" not in failure


def test_what_passes_is_tried_again(judge):
    failures = [503, 429]
    judge.answer = lambda prompt: (
        (failures.pop(), b"busy", {}) if failures else served.completion("Conclusion: True")
    )
    assert _ask(judge)["accuracy"] == 1
    assert len(judge.requests) == 3


def test_after_three_texts_without_a_reply_a_server_is_asked_no_more(judge, capsys):
    judge.answer = lambda prompt: (500, b"", {})
    assert _ask(judge, *"abcde")["unjudged"] == 5
    assert len(judge.requests) == 3 * 3
    assert "5 of 5 texts are unjudged: " in capsys.readouterr().err
