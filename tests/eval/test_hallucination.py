"""Contextual hallucination, whole: texts by whole forward passes, judges that come and go."""

import copy
import json
from dataclasses import replace

import pytest
import tests_judge_server as served
import torch

from clearhead import ClearheadError
from clearhead.eval import hallucination
from clearhead.eval.answers import Reader
from clearhead.eval.document_prompts import PromptTemplate, load_cases
from clearhead.eval.grounding_metrics import grounding_metrics
from clearhead.eval.hallucination import (
    HallucinationTask,
    JsonlCache,
    JudgedGeneration,
    _stopped,
    _until,
)
from clearhead.eval.judges import JudgeConfig
from clearhead.records.intervals import wilson

from .conftest import numbers


def _ignore(steps):
    pass


@pytest.fixture
def files(tmp_path):
    """Six answers of unlike documents, and five questions to two long ones."""
    answers = [
        {
            "question": f"who left {n}",
            "answers": ["the ship", "Ann"],
            "passage": "The ship left the harbour in the morning. " * (1 + 5 * n % 7),
        }
        for n in range(6)
    ]
    stories = [
        {
            "text": f"{n} The old woman knew, and was silent. " * 30,
            "questions": [{"question": f"what {q}", "summaries": ["x"]} for q in range(2 + n)],
        }
        for n in range(2)
    ]
    paths = []
    for name, rows in (("answers", answers), ("stories", stories)):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, rows)))
    return tuple(map(str, paths))


@pytest.fixture
def task(files):
    return HallucinationTask(files=files, answer_tokens=7, summary_tokens=9)


@pytest.fixture
def subject(make_subject, tmp_path):
    subject = make_subject(lengths=(192,), kept=tmp_path / "kept.texts")
    subject.model.double()
    return subject


def _lines(subject):
    return list(map(json.loads, subject.kept.read_text("utf-8").splitlines()))


def _by_hand(subject, ids, new_tokens):
    """Greedy decoding of one prompt by whole forward passes."""
    ids, start = list(ids), len(ids)
    for _ in range(new_tokens):
        with torch.no_grad():
            token = int(subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == subject.tokenizer.eos_token_id:
            break
        ids.append(token)
    return subject.decode(ids[start:])


def test_texts_and_measures_are_what_is_found_by_hand(subject, task):
    template = PromptTemplate(subject.tokenizer, subject.encoder, chat=False)
    cells = task.cells(subject)
    assert [(cell["file"], cell["length"]) for cell in cells] == [
        *(("answers.jsonl", 192), ("stories.jsonl", 192))
    ]
    for cell, file, tokens, stop in zip(cells, task.files, (7, 9), ("\n", "\n\n"), strict=True):
        advanced = []
        found = numbers(task.measure(subject, cell, advanced.append))
        cases, texts, prompts = load_cases(file), [], []
        for document in dict.fromkeys(case.document for case in cases):
            mine = [case for case in cases if case.document == document]
            for one in template.prompts(mine, 192 - tokens):
                text = _by_hand(subject, one.prompt.ids, tokens)
                text = text.strip().partition(stop)[0].rstrip()
                texts.append(text)
                prompts.append(one)
        assert sum(advanced) == len(cases) == found["items"]
        kept = {
            line["question"]: line["text"]
            for line in _lines(subject)
            if file.endswith(line["file"])
        }
        if cell["file"] == "answers.jsonl":
            assert kept == {
                one.case.question: text for one, text in zip(prompts, texts, strict=True)
            }
        metrics = grounding_metrics(texts, prompts)
        assert {key: found[key] for key in metrics} == pytest.approx(metrics)
        assert found["cut"] == (cell["file"] == "stories.jsonl")
        assert found["prompt_tokens"] == pytest.approx(
            sum(len(one.prompt.ids) for one in prompts) / len(prompts)
        )
        assert 0 <= found["ended"] <= 1
        assert "accuracy" not in found


@pytest.fixture
def write(subject, task):
    """write(stop): what is written to the six questions, nothing kept."""
    template = PromptTemplate(subject.tokenizer, subject.encoder, chat=False)
    prompts = [b for case in load_cases(task.files[0]) for b in template.prompts([case], 400)]

    def make(stop):
        work, count = (
            JudgedGeneration(prompts, JsonlCache(None), "answers.jsonl", _ignore),
            len(prompts),
        )
        return work.write(subject, tokens=[9] * count, stops=[stop] * count, before=None)

    make.prompts = prompts
    return make


def test_a_text_ends_where_it_is_told_to(subject, write, monkeypatch):
    reader, steps = subject.reader, []
    step = reader.prefill.step
    monkeypatch.setattr(reader, "_batch_tokens", 1)  # each by itself
    monkeypatch.setattr(reader.prefill, "step", lambda *words: steps.append(1) or step(*words))
    free = write(None)
    assert len(steps) == 6 * 8
    assert not any(one.ended for one in free)
    letter = sorted(free[0].text[1:])[-1]  # one that comes up
    for whole, stopped in zip(free, write(letter), strict=True):
        assert stopped.text == whole.text.partition(letter)[0].rstrip()
        assert stopped.ended == (letter in whole.text)
    assert len(steps) < 2 * 6 * 8  # and no more is written


def test_a_text_ends_by_any_end_token_of_the_model(subject, write):
    free = write(None)
    ids = write.prompts[0].prompt.ids
    answer = next(subject.reader.each([write.prompts[0].prompt], [()], new_tokens=9))[0].written
    assert subject.decode(answer).strip() == free[0].text
    place = next(n for n in range(2, 9) if answer[n] not in answer[:n])
    subject.release()
    subject.model.generation_config.eos_token_id = [answer[place], 9]
    short = write(None)[0]
    assert short.ended
    assert short.text == subject.decode(answer[:place]).strip() == _by_hand(subject, ids, place)


def test_space_before_a_text_does_not_end_it():
    assert not _stopped("\n\n ", "\n")
    assert _stopped("\n\n so\n", "\n")
    assert not _stopped("so\n", None)
    assert _until("\n\n so it is \nand", "\n") == "so it is"
    assert _until(" so\nit is ", None) == "so\nit is"


def test_nothing_but_end_tokens_ends_what_a_chat_model_says(subject, task, monkeypatch):
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\nso:{% endfor %}"
    subject = replace(subject, tokenizer=tokenizer)
    monkeypatch.setattr(hallucination, "stop_of", lambda case: "e")
    plain, chat = (
        numbers(
            replace(task, files=task.files[:1], chat=chat).measure(
                subject, task.cells(subject)[0], _ignore
            )
        )
        for chat in (False, True)
    )
    assert plain["ended"] > 0 == chat["ended"]
    assert any("e" in line["text"] for line in _lines(subject)[-6:])


def test_samples_are_drawn_by_the_seed_alone(make_subject, task):
    def asked(seed, samples):
        subject = make_subject(lengths=(192,), seed=seed)
        groups = replace(task, samples=samples)._together(subject, task.files[0])
        return [case.question for group in groups for case in group]

    assert len(asked(0, 100)) == 6
    assert len(set(asked(0, 4))) == 4
    assert asked(0, 4) == asked(0, 4)
    assert any(asked(0, 4) != asked(seed, 4) for seed in (1, 2, 3))


def _judged(task, server, **changes):
    changes = {"endpoint": server.url, "model": "gpt-x", "tries": 2, **changes}
    return replace(task, judge=JudgeConfig(**changes))


def _verdict(prompt):
    """By the question's number: four supported, one not, one undecided."""
    for number, said in ((1, "Conclusion: False"), (4, "who knows")):
        if f"who left {number}" in prompt:
            return served.completion(said)
    return served.completion("So it is.\n**Conclusion: True**")


def test_a_judge_gives_the_accuracy(subject, task, judge):
    judge.answer = _verdict
    task = _judged(task, judge)
    cell = task.cells(subject)[0]
    assert cell["judge"] == "gpt-x"
    found = numbers(task.measure(subject, cell, _ignore))
    assert found["accuracy"] == 4 / 5
    assert (found["low"], found["high"]) == wilson(4, 5)
    assert found["undecided"] == 1
    assert found["judged_by"] == ["judge-2026"]
    assert found["items"] == 6
    verdicts = [line for line in _lines(subject) if "supported" in line]
    assert {line["question"]: line["supported"] for line in verdicts} == {
        f"who left {n}": {1: False, 4: None}.get(n, True) for n in range(6)
    }
    texts = {line["question"]: line["text"] for line in _lines(subject) if "ended" in line}
    for prompt in judge.prompts:
        (question,) = [q for q in texts if f"Question:\n{q}\n" in prompt]
        assert f"Proposed answer:\n{texts[question]}\n" in prompt
    judge.answer = lambda prompt: served.completion("?")
    none = numbers(_judged(task, judge, model="other").measure(subject, cell, _ignore))
    assert none["undecided"] == 6
    assert "accuracy" not in none


def test_a_judge_reads_what_the_model_saw(subject, task, judge):
    task = _judged(task, judge)
    template = PromptTemplate(subject.tokenizer, subject.encoder, chat=False)
    found = numbers(task.measure(subject, task.cells(subject)[1], _ignore))
    assert (found["accuracy"], found["cut"]) == (1, 1)
    cases = load_cases(task.files[1])
    for document in {case.document for case in cases}:
        mine = [case for case in cases if case.document == document]
        (shown,) = {one.document for one in template.prompts(mine, 192 - 9)}
        assert len(shown) < len(document)
        asked = [prompt for prompt in judge.prompts if f"Document:\n{shown}\n\nQ" in prompt]
        assert len(asked) == len(mine)


def test_neither_texts_nor_verdicts_are_made_twice(subject, task, judge, monkeypatch):
    cell = task.cells(subject)[0]
    alone = numbers(task.measure(subject, cell, _ignore))
    monkeypatch.setattr(Reader, "each", lambda *words, **options: pytest.fail("written again"))
    judge.answer = _verdict
    task = _judged(task, judge)
    found = numbers(task.measure(subject, cell, _ignore))
    assert len(judge.prompts) == 6
    assert alone.pop("headlines") != found["headlines"]
    assert {key: found[key] for key in alone} == alone
    assert numbers(task.measure(subject, cell, _ignore)) == found
    assert len(judge.prompts) == 6
    _judged(task, judge, model="gpt-y").measure(subject, cell, _ignore)
    assert len(judge.prompts) == 12  # another judge, the same texts
    monkeypatch.undo()
    other = replace(task, answer_tokens=8)
    before = len(_lines(subject))
    other.measure(subject, cell, _ignore)
    assert len([line for line in _lines(subject)[before:] if "ended" in line]) == 6
    judge.close()
    assert numbers(task.measure(subject, cell, _ignore)) == found  # all is known: nobody is asked


def test_texts_of_another_model_are_its_own(subject, make_subject, task):
    cell = task.cells(subject)[0]
    task.measure(subject, cell, _ignore)
    other = make_subject("differential", lengths=(192,), kept=subject.kept)
    other.model.double()
    task.measure(other, cell, _ignore)
    assert len(_lines(subject)) == 12
    other = replace(other)
    other.model.bfloat16()
    task.measure(other, cell, _ignore)
    other = replace(other)
    other.model.float()  # the numbers of bfloat16, in another type
    task.measure(other, cell, _ignore)
    assert len(_lines(subject)) == 24


def test_a_judge_that_goes_away_leaves_what_is_done(subject, task, judge):
    def leaving(prompt):
        if len(judge.prompts) > 3:
            raise ConnectionError
        return _verdict(prompt)

    judge.answer = leaving
    task = _judged(task, judge)
    cell = task.cells(subject)[0]
    with pytest.raises(
        ClearheadError, match="tried 2 times: see that it runs; what is wr"
    ) as error:
        task.measure(subject, cell, _ignore)
    assert str(subject.kept) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(_lines(subject)) == 6 + 3
    with subject.kept.open("a") as file:
        file.write('{"key": "torn')
    judge.requests.clear()
    judge.answer = _verdict
    found = numbers(task.measure(subject, cell, _ignore))
    assert len(judge.prompts) == 3
    assert found["accuracy"] == 4 / 5
    assert len({line["key"] for line in _lines(subject)}) == len(_lines(subject)) == 12


def test_a_judge_that_is_not_there_is_found_out_first(subject, task, judge):
    task = _judged(task, judge, tries=1)
    judge.close()
    with pytest.raises(ClearheadError, match="cannot be reached"):
        task.measure(subject, task.cells(subject)[0], _ignore)
    assert not subject.kept.exists()
    bare = replace(subject, kept=None)
    with pytest.raises(ClearheadError, match="cannot be reached"):
        task.measure(bare, task.cells(bare)[0], _ignore)


def test_what_is_asked_twice_is_written_once(subject, task, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:1] * 3))
    found = numbers(task.measure(subject, task.cells(subject)[0], _ignore))
    assert found["items"] == 3
    assert len(_lines(subject)) == 1


def test_a_local_judge(subject, task, tmp_path):
    subject.model.config.max_position_embeddings = 600
    subject.model.float().save_pretrained(tmp_path / "tiny")
    subject.tokenizer.save_pretrained(tmp_path / "tiny")
    local = replace(task, judge=JudgeConfig(model=str(tmp_path / "tiny"), new_tokens=5))
    cell = local.cells(subject)[0]
    assert cell["judge"] == "tiny"
    found = numbers(local.measure(subject, cell, _ignore))
    assert found["undecided"] == 6  # it is untrained
    assert found["judged_by"] == ["tiny"]
    replies = [line["reply"] for line in _lines(subject) if "supported" in line]
    assert len(replies) == 6
    assert all(replies)
    assert numbers(local.measure(subject, cell, _ignore)) == found  # all of it is kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ()}, "hallucination needs files"),
        ({"files": ("a/x.jsonl", "b/x.jsonl")}, "two files are called x.jsonl"),
        ({"files": ("none.jsonl",)}, "no such file"),
        ({"samples": 0}, "samples is 0"),
        ({"answer_tokens": 0}, "answer_tokens is 0"),
        ({"summary_tokens": 190}, r"takes \d+ tokens without its document.* leaves 2 for both"),
        ({"chat": True}, "no chat template"),
        ({"judge": JudgeConfig(endpoint="http://127.0.0.1:1/v1")}, "needs the name of a model"),
    ],
)
def test_refuses_at_once_what_cannot_be_measured(subject, task, changes, message):
    with pytest.raises(ClearheadError, match=message) as error:
        replace(task, **changes).cells(subject)
    assert "\n" not in str(error.value)


def test_refuses_lengths_beyond_learned_positions(make_subject, task):
    with pytest.raises(ClearheadError, match="64 learned positions of this model"):
        task.cells(make_subject("gpt2"))


def test_a_file_of_something_else_is_left_alone(subject, task):
    subject.kept.write_text('{"kind": "cell"}\n')
    with pytest.raises(ClearheadError, match=r"line 1: not a text or verdict .*: move the file"):
        task.measure(subject, task.cells(subject)[0], _ignore)
    assert subject.kept.read_text() == '{"kind": "cell"}\n'
