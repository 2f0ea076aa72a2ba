"""Prompts on documents: rows of files, what is cut, what is shared, and chat templates."""

import copy
import gzip
import json
from types import SimpleNamespace

import pytest

from clearhead import ClearheadError
from clearhead.eval.document_prompts import Case, PromptTemplate, _text, digest_of, load_cases

REFERENCES = ("one", "two")
FORMS = {
    "nq": (
        {"question": " who\nleft ", "answers": REFERENCES, "title": "Sea", "passage": "It left. "},
        [Case(kind="answer", document="Sea\nIt left.", question="who left", references=REFERENCES)],
    ),
    "hotpotqa": (
        {
            "id": "7",
            "question": "Who?",
            "answers": ["one"],
            "contexts": [
                {"title": "A", "text": "It.", "gold": True},
                {"title": "B", "text": "Then."},
            ],
        },
        [Case(kind="answer", document="A\nIt.\n\nB\nThen.", question="Who?", references=("one",))],
    ),
    "longbench": (
        {"input": "Who?", "context": "It.", "answers": ["one"], "dataset": "qasper"},
        [Case(kind="answer", document="It.", question="Who?", references=("one",))],
    ),
    "longbench summary": (
        {"input": "", "context": "It.", "answers": ["one"]},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "scitldr": (
        {"paper_id": "x", "source": [" It.", "It left."], "target": REFERENCES, "ic": True},
        [Case(kind="summary", document="It. It left.", question="", references=REFERENCES)],
    ),
    "summaries": (
        {"id": "x", "title": "T", "text": "It.", "summaries": REFERENCES},
        [Case(kind="summary", document="It.", question="", references=REFERENCES)],
    ),
    "xsum": (
        {"document": "It.", "summary": "one", "id": "1"},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "cnn": (
        {"article": "It.", "highlights": "one", "id": "1"},
        [Case(kind="summary", document="It.", question="", references=("one",))],
    ),
    "squality": (
        {
            "text": "It.",
            "questions": [
                {"question": "Who?", "summaries": REFERENCES},
                {"question": "Why?", "summaries": ["three"]},
            ],
        },
        [
            Case(kind="summary", document="It.", question="Who?", references=REFERENCES),
            Case(kind="summary", document="It.", question="Why?", references=("three",)),
        ],
    ),
    "qmsum": (
        {"text": "A: It.", "queries": [{"type": "general", "query": "Who?", "answer": "one"}]},
        [Case(kind="summary", document="A: It.", question="Who?", references=("one",))],
    ),
}


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="rows.jsonl"):
        path = tmp_path / name
        with (gzip.open if name.endswith(".gz") else open)(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return str(path)

    return make


@pytest.mark.parametrize("form", FORMS)
def test_the_fields_tell_what_is_asked(write, form):
    row, cases = FORMS[form]
    assert load_cases(write(row, row, name="rows.jsonl.gz")) == cases * 2


NQ = FORMS["nq"][0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [NQ, {"question": "who", "answers": ["x"]}],
            r"line 2 lacks passage \(a row has passage, question, answers\); it has question, answ",
        ),
        (
            [{"text": "It.", "id": 1}],
            r"lacks summaries \(a row has text, summaries\); it has text,",
        ),
        ([{"text": "It."} | {"label": 1, "story": 2}], "it has text, label, story"),
        ([{"story": "It.", "label": 1}], "line 1 lacks passage, question, answers or .*has story"),
        ([{}], "it has nothing"),
        ([[1]], "line 1 is no object"),
        ([NQ, FORMS["xsum"][0]], "line 2 has document, summary, and the rows before it passage, q"),
        (
            [{"text": "It.", "queries": [{"query": "a", "answer": "b"}, {"query": "a"}]}],
            "line 1, queries 2 lacks answer; it has query",
        ),
        (
            [{**FORMS["hotpotqa"][0], "contexts": [{"title": "a", "body": "b"}]}],
            "line 1, contexts 1 lacks text; it has title, body",
        ),
        (
            [{**FORMS["hotpotqa"][0], "contexts": ["a"]}],
            r"contexts must be a list of objects and not empty; found \['a'\]",
        ),
        ([{**NQ, "answers": []}], r"answers must be a text, or a list of them, .*found \[\]"),
        ([{**NQ, "answers": [1]}], r"found \[1\]"),
        ([{**NQ, "passage": " "}], "passage must be a text and not empty; found ' '"),
        ([{**NQ, "question": 7}], "question must be a text and not empty; found 7"),
        ([{**NQ, "question": " "}], "question is empty"),
        ([{"text": "It.", "queries": {"query": "a"}}], "queries must be a list of objects"),
        ([], "rows.jsonl has nothing to ask: give a row a line, with passage, question"),
    ],
)
def test_refuses_rows_that_lack_a_field(write, rows, message):
    with pytest.raises(ClearheadError, match=message) as error:
        load_cases(write(*rows))
    assert "\n" not in str(error.value)


def test_refuses_files_that_cannot_be_read(tmp_path, write):
    with pytest.raises(ClearheadError, match=r"no such file; give a .jsonl.* or hf:NAME"):
        load_cases(str(tmp_path / "none.jsonl"))
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(ClearheadError, match=r"rows.txt': no such file; give a .jsonl"):
        load_cases(str(tmp_path / "rows.txt"))
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(NQ) + "\n{no")
    with pytest.raises(ClearheadError, match="line 2: not JSON"):
        load_cases(str(path))
    with pytest.raises(ClearheadError, match=r"found 'a{50,60}$"):  # a part of it
        load_cases(write({**FORMS["qmsum"][0], "queries": "a" * 900}))


def test_a_data_set_of_the_hub_is_read_once(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [FORMS["xsum"][0], {"document": "It.", "summary": None}]
    (tmp_path / "set" / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:1])))
    source = f"hf:{tmp_path / 'set'}#test"
    assert load_cases(source) == FORMS["xsum"][1]
    (tmp_path / "set" / "test.jsonl").unlink()
    assert load_cases(source) == FORMS["xsum"][1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    other = f"hf:{tmp_path / 'other'}#test"
    assert digest_of(other) != digest_of(source)
    with pytest.raises(ClearheadError, match=r"^hf:.*#test, row 2: summary must be a text"):
        load_cases(other)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ClearheadError, match="cannot be had from the hub"):
        load_cases(f"hf:{tmp_path / 'none'}")


DOCUMENT = " ".join(f"The ship left the harbour in the morning, {n} é." for n in range(40))
QUESTIONS = ("Who left?", "What of the old captain of the ship?", "When?")
CHAT = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def _cases(kind, *questions, document=DOCUMENT):
    return [Case(kind=kind, document=document, question=q, references=("x",)) for q in questions]


@pytest.fixture
def template(subject):
    return PromptTemplate(subject.tokenizer, subject.encoder, chat=False)


@pytest.mark.parametrize(
    ("kind", "question", "end"),
    [
        ("answer", "Who {left}?", "\n\nQuestion: Who {left}?\nAnswer:"),
        ("summary", "", "\n\nSummary:"),
        ("summary", "Who?", "\n\nQuestion: Who?\nSummary:"),
    ],
)
def test_a_prompt_is_instructions_document_question(subject, template, kind, question, end):
    document = "It {was} a <|end|> ship."
    (one,) = template.prompts(_cases(kind, question, document=document), 4000)
    assert not one.cut
    assert one.document == document
    ids = one.prompt.ids
    assert ids[: len(subject.begin)] == subject.begin
    assert subject.tokenizer.eos_token_id not in ids
    text = subject.tokenizer.decode(ids[len(subject.begin) :])
    assert text.endswith(f"\n\nDocument:\n{document}{end}")
    assert len(one.prompt.tail) == 1
    assert subject.encoder.pieces(text)[0] == ids[len(subject.begin) :]


@pytest.mark.parametrize("room", [150, 151, 152, 153, 260, 300])
def test_a_long_document_loses_its_end_alike_for_all_questions(subject, template, room):
    cases = _cases("answer", *QUESTIONS)
    prompts = template.prompts(cases, room)
    (shown,) = {one.document for one in prompts}
    assert all(one.cut for one in prompts)
    assert DOCUMENT.startswith(shown)
    longest = max(len(one.prompt.ids) for one in prompts)
    assert room - 4 <= longest <= room  # a word at the cut may come apart, and spaces go
    for one, case in zip(prompts, cases, strict=True):
        text = subject.tokenizer.decode(one.prompt.ids[len(subject.begin) :])
        assert text.endswith(f"{shown}\n\nQuestion: {case.question}\nAnswer:")
    (context,) = {one.prompt.context for one in prompts}
    assert subject.tokenizer.decode(context).endswith(f"{shown}\n\nQuestion:")


def test_a_cut_whose_words_come_apart_is_made_again():
    words = [f"w{n}" for n in range(30)]

    def tokenizer(text, **options):
        starts = [text.index(word + " ") for word in words]
        return {"offset_mapping": [(start, start + 1) for start in starts]}

    def encode(text):  # a token a word; two more where a document is cut
        return (7,) * (len(text.split()) + 2 * ("w0" in text and "w29" not in text))

    encoder = SimpleNamespace(begin=None, pieces=lambda text: [encode(text)])
    template = PromptTemplate(tokenizer, encoder, chat=False)
    cases = _cases("answer", "Who?", document=" ".join(words) + " ")
    room = len(template.ids("")) + 30
    (one,) = template.prompts(cases, room)
    assert len(one.prompt.ids) == room
    assert one.document == " ".join(words[: room - 2 - len(encode(_text(cases[0], "")))])


def test_a_document_that_just_fits_is_whole(template):
    cases = _cases("answer", *QUESTIONS)
    room = max(len(one.prompt.ids) for one in template.prompts(cases, 99_999))
    assert not any(one.cut for one in template.prompts(cases, room))
    assert all(one.cut for one in template.prompts(cases, room - 1))


def test_refuses_room_without_a_document(template):
    cases = _cases("answer", *QUESTIONS)
    bare = max(
        len(b.prompt.ids) for b in template.prompts(_cases("answer", *QUESTIONS, document=""), 999)
    )
    template.check(cases, bare + 1)
    for room in (bare, -5):
        with pytest.raises(
            ClearheadError, match=f"takes {bare} tokens without .* {max(0, room)} f"
        ):
            template.check(cases, room)


def test_a_chat_template_is_put_around_the_text(subject, template):
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = CHAT
    chat = PromptTemplate(tokenizer, subject.encoder, chat=True)
    cases = _cases("summary", "", document="It <|end|> <|begin|>was.")
    (one,), (plain,) = chat.prompts(cases, 900), template.prompts(cases, 900)
    before = tokenizer("<|begin|>user\n", add_special_tokens=False)["input_ids"]
    after = tokenizer("<|end|>\n<|begin|>assistant\n", add_special_tokens=False)["input_ids"]
    inner = plain.prompt.ids[len(subject.begin) :]
    assert one.prompt.ids == (*before, *inner, *after)
    assert one.prompt.ids.count(tokenizer.eos_token_id) == 1  # the template's; not the document's
    cut = chat.prompts(_cases("answer", *QUESTIONS), 200)
    assert max(len(one.prompt.ids) for one in cut) <= 200


def test_refuses_chat_without_a_template(subject):
    with pytest.raises(ClearheadError, match="has no chat template: leave chat out"):
        PromptTemplate(subject.tokenizer, subject.encoder, chat=True)
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = "{{ messages | length }} messages"
    with pytest.raises(ClearheadError, match="leaves out what the user says"):
        PromptTemplate(tokenizer, subject.encoder, chat=True)
