"""Judges: what they are asked, strict verdicts, and an endpoint that fails in every way."""

import os

import pytest
import tests_judge_server as served

from clearhead import ClearheadError
from clearhead.eval import judges
from clearhead.eval.document_prompts import Case
from clearhead.eval.judges import JudgeConfig, LocalJudge, RemoteJudge, conclusion, question_to

ANSWER = Case(kind="answer", document="all of it", question="Who?", references=("one", "two"))
SUMMARY = Case(kind="summary", document="all of it", question="", references=("short",))


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It says so.\nConclusion: True", True),
        ("It does not.\n\n**Conclusion: False**\n", False),
        ("**Conclusion:** true.", True),
        ("  _CONCLUSION_ : `False`  \nmore", False),
        ("Conclusion: True\nso\nConclusion: True", True),
        ("Conclusion: True\nConclusion: False", None),
        ("Conclusion: True or False", None),
        ("My conclusion: True", None),
        ("Conclusion: True2", None),
        ("Conclusion:\nTrue", None),
        ("True", None),
        ("Conclusion: not False", None),
        ("", None),
    ],
)
def test_a_conclusion_is_read_strictly(reply, verdict):
    assert conclusion(reply) is verdict


def test_what_a_judge_reads():
    asked = question_to(ANSWER, "a {part} of it", "It was {one}.")
    for part in (
        *("a document and a question on it, and a proposed answer", "Document:\na {part} of it\n"),
        *("Question:\nWho?\n", "Reference:\none\ntwo\n", "Proposed answer:\nIt was {one}.\n"),
    ):
        assert part in asked
    assert "all of it" not in asked  # the judge sees what the model saw
    assert "question" not in question_to(SUMMARY, "x", "y").lower()
    assert conclusion(asked) is None


def _judge(server, **changes):
    return RemoteJudge(
        JudgeConfig(**{"endpoint": server.url, "model": "gpt-x", "tries": 3, **changes})
    )


def test_an_endpoint_is_asked_at_temperature_0_with_its_key(judge, monkeypatch):
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    judge.answer = lambda prompt: served.completion(f"{prompt}!")
    asked = _judge(judge, key_variable="MY_KEY", new_tokens=7)
    asked.check()
    found = dict(asked.replies(["one", "two é"]))
    assert {n: (reply.text, reply.model) for n, reply in found.items()} == {
        0: ("one!", "judge-2026"),
        1: ("two é!", "judge-2026"),
    }
    assert [path for path, _, _ in judge.requests] == [
        *("/v1/models", "/v1/chat/completions", "/v1/chat/completions")
    ]
    assert {headers["Authorization"] for _, headers, _ in judge.requests} == {"Bearer sk-secret"}
    assert judge.requests[1][2] == {
        "model": "gpt-x",
        "messages": [{"role": "user", "content": "one"}],
        "temperature": 0,
        "max_tokens": 7,
    }
    judge.requests.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_mine")  # is the hub's
    judge.answer = lambda prompt: served.completion(None)  # as when all tokens went into thought
    assert dict(_judge(judge).replies(["one"]))[0].text == ""
    assert "Authorization" not in judge.requests[0][1]


@pytest.mark.parametrize("status", [408, 429, 500, 503, "cut"])
def test_what_may_pass_is_tried_again(judge, monkeypatch, status):
    pauses = []
    monkeypatch.setattr(judges.time, "sleep", pauses.append)
    monkeypatch.setattr(judges, "FIRST_PAUSE", 1.0)
    failures = [status, status]

    def answer(prompt):
        if not failures:
            return served.completion("Conclusion: True")
        if failures.pop() == "cut":
            raise ConnectionError
        return status, b"busy", {"Retry-After": "7"} if status == 429 else {}

    judge.answer = answer
    assert dict(_judge(judge).replies(["one"]))[0].text == "Conclusion: True"
    assert len(judge.requests) == 3
    assert pauses == ([7, 7] if status == 429 else [1, 2])


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_a_server_without_a_list_of_models_is_there(judge, status):
    judge.models = (status, b"no such thing", {})
    _judge(judge).check()
    assert len(judge.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_is_found_out_first(judge, status):
    judge.models = (status, {"error": {"message": "who are you"}}, {})
    with pytest.raises(ClearheadError, match=rf"{status} \(who are you\): name the variable that"):
        _judge(judge).check()


def test_a_server_that_does_not_recover_or_is_not_there(judge):
    judge.answer = lambda prompt: (500, {"error": {"message": "out of\nmemory"}}, {})
    with pytest.raises(ClearheadError, match=r"answers 500 \(out of memory\), tried 3 times"):
        list(_judge(judge).replies(["one"]))
    assert len(judge.requests) == 3
    gone = _judge(judge, tries=1)
    judge.close()
    for ask in (gone.check, lambda: list(gone.replies(["one"]))):
        with pytest.raises(ClearheadError, match=r"cannot be reached \(.*refused\), tried once"):
            ask()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"error": {"message": "no model gpt-x"}}, {}), r"404 \(no model gpt-x\): check the"),
        ((400, {"error": "too long"}, {}), r"answers 400 \(too long\)"),
        ((400, b"", {}), r"answers 400 \(Bad Request\)"),
        (
            (401, {"error": {"message": "bad key sk-secret"}}, {}),
            r"bad key \[key\]\): name the var",
        ),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), "answers 302 .*redirects are not foll"),
        ((200, b"<html>hello", {}), "answers '<html>hello', which is no chat completion"),
        ((200, {"choices": []}, {}), "which is no chat completion"),
        ((200, b"[" * 100_000, {}), "which is no chat completion"),
        ((200, ["x"], {}), "which is no chat completion"),
    ],
)
def test_what_does_not_pass_is_said_at_once(judge, monkeypatch, answer, message):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge.answer = lambda prompt: answer
    with pytest.raises(ClearheadError, match=message) as error:
        list(_judge(judge, key_variable="MY_KEY").replies(["one"]))
    assert len(judge.requests) == 1
    assert "sk-secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_is_echoed_is_not_passed_on(judge, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge.answer = lambda prompt: served.completion("Bearer sk-secret: yes", model="x sk-secret")
    asked = _judge(judge, key_variable="MY_KEY")
    (reply,) = dict(asked.replies(["one"])).values()
    assert (reply.text, reply.model) == ("Bearer [key]: yes", "x [key]")
    escaped = rb'{"\u0073k-secret": ["\u0073k-secret"]}'  # as JSON may write it
    for status in (200, 400):
        judge.answer = lambda prompt, status=status: (status, escaped, {})
        with pytest.raises(ClearheadError, match=r'\{"\[key\]": \["\[key\]"\]\}'):
            list(asked.replies(["one"]))


URL = {"endpoint": "http://127.0.0.1:1/v1", "model": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**URL, "model": ""}, "judge.endpoint needs the name of a model"),
        ({"model": "x", "tries": 4}, "judge.tries has no effect without judge.endpoint"),
        ({"key_variable": "K"}, "judge.key-variable has no effect"),
        ({**URL, "trust_remote_code": True}, "judge.trust-remote-code has no effect with"),
        ({"new_tokens": 9}, "judge.new-tokens has no effect without judge.model"),
        ({**URL, "endpoint": "file:///etc/passwd"}, r"is no http\(s\) URL"),
        ({**URL, "endpoint": "127.0.0.1:8000/v1"}, r"is no http\(s\) URL"),
        ({**URL, "endpoint": "http://x:port/v1"}, r"is no http\(s\) URL"),
        ({**URL, "endpoint": "http://a b/v1"}, r"is no http\(s\) URL"),
        ({**URL, "endpoint": "http://jüdge/v1"}, r"is no http\(s\) URL in ASCII"),
        ({**URL, "endpoint": "http://judge/é\n"}, r"is no http\(s\) URL in ASCII"),
        ({**URL, "endpoint": "http://me:secret@x/v1"}, "without user, password and"),
        ({**URL, "endpoint": "http://x/v1?key=secret"}, "without user, password and"),
        ({**URL, "key_variable": "NO_SUCH_KEY"}, r"NO_SUCH_KEY \(judge.key-variable\) holds no"),
        ({**URL, "key_variable": "BAD_KEY"}, r"BAD_KEY \(judge.key-variable\) holds no key"),
        ({**URL, "tries": 0}, "judge.tries is 0: give a whole number of at least 1"),
        ({**URL, "timeout": 0.0}, "judge.timeout is 0.0: give a number above 0"),
        ({"model": "x", "new_tokens": 0}, "judge.new_tokens is 0"),
        ({"model": "no/such"}, "cannot load a model from 'no/such'"),
    ],
)
def test_refuses_options_that_cannot_work(monkeypatch, changes, message):
    monkeypatch.setenv("BAD_KEY", "se\ncret")
    with pytest.raises(ClearheadError, match=message) as error:
        JudgeConfig(**changes).check()
    assert "secret" not in str(error.value)
    assert os.environ["BAD_KEY"] not in str(error.value)


def test_options_that_work(local):
    here = {"model": local[1], "new_tokens": 9}
    for changes in ({}, here, URL, {**URL, "tries": 2, "timeout": 1.0}):
        JudgeConfig(**changes).check()


@pytest.fixture
def local(make_subject, tmp_path):
    """A tiny model in a folder, and what it was saved from."""
    subject = make_subject()
    subject.model.config.max_position_embeddings = 400
    subject.model.save_pretrained(tmp_path / "judge")
    subject.tokenizer.save_pretrained(tmp_path / "judge")
    return subject, str(tmp_path / "judge")


def _by_hand(subject, ids, new_tokens):
    """What transformers' own greedy generation writes to one prompt."""
    import torch

    ids_1T = torch.tensor([ids])
    out = subject.model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=subject.tokenizer.eos_token_id,
        pad_token_id=subject.tokenizer.pad_token_id,
    )
    return subject.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("batch_tokens", [1, 4000])
def test_a_local_judge_writes_what_generate_writes(local, batch_tokens):
    subject, folder = local
    judge = LocalJudge(
        JudgeConfig(model=folder, new_tokens=9), device="cpu", batch_tokens=batch_tokens
    )
    judge.check()
    prompts = [question_to(SUMMARY, "The ship left. " * n, "It left") for n in (1, 3, 2)]
    found = dict(judge.replies(prompts))
    assert sorted(found) == [0, 1, 2]
    for number, prompt in enumerate(prompts):
        ids = (*subject.begin, *subject.encoder.pieces(prompt)[0])
        assert found[number].text == _by_hand(subject, ids, 9)
        assert found[number].model == "judge"


def test_a_local_judge_is_asked_in_its_chat_template(local, tmp_path):
    subject, folder = local
    plain = LocalJudge(JudgeConfig(model=folder), device="cpu", batch_tokens=900)
    template = "{% for m in messages %}<|begin|>{{ m.content }}<|end|>{% endfor %}so:"
    (tmp_path / "judge" / "chat_template.jinja").write_text(template)
    judge = LocalJudge(JudgeConfig(model=folder, new_tokens=9), device="cpu", batch_tokens=900)
    begin, end = subject.tokenizer.bos_token_id, subject.tokenizer.eos_token_id
    ids = (begin, *subject.encoder.pieces("a <|end|> b")[0], end, *subject.encoder.pieces("so:")[0])
    assert dict(judge.replies(["a <|end|> b"]))[0].text == _by_hand(subject, ids, 9)
    assert judge.identity != plain.identity


def test_a_local_judge_refuses_what_it_cannot_read(local, tmp_path):
    judge = LocalJudge(JudgeConfig(model=local[1]), device="cpu", batch_tokens=900)
    with pytest.raises(ClearheadError, match=r"judge judge reads 400 tokens, and 5\d\d are asked"):
        list(judge.replies(["The ship left."]))
    with pytest.raises(ClearheadError, match="cannot load a model from"):
        LocalJudge(JudgeConfig(model=str(tmp_path)), device="cpu", batch_tokens=900)
