"""Prompts on documents: what stands in them, what is cut, what is shared, and chat templates."""

import copy

import pytest

from clearhead import ClearheadError
from clearhead.eval.briefs import Frame, _text
from clearhead.eval.cases import Case

DOCUMENT = " ".join(f"The ship left the harbour in the morning, {n} é." for n in range(40))
QUESTIONS = ("Who left?", "What of the old captain of the ship?", "When?")
CHAT = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def _cases(kind, *questions, document=DOCUMENT):
    return [Case(kind=kind, document=document, question=q, references=("x",)) for q in questions]


@pytest.fixture
def frame(subject):
    return Frame(subject.tokenizer, subject.encode, subject.begin, chat=False)


@pytest.mark.parametrize(
    ("kind", "question", "end"),
    [
        ("answer", "Who {left}?", "\n\nQuestion: Who {left}?\nAnswer:"),
        ("summary", "", "\n\nSummary:"),
        ("summary", "Who?", "\n\nQuestion: Who?\nSummary:"),
    ],
)
def test_a_prompt_is_instructions_document_question(subject, frame, kind, question, end):
    document = "It {was} a <|end|> ship."
    (brief,) = frame.briefs(_cases(kind, question, document=document), 4000)
    assert not brief.cut
    assert brief.document == document
    ids = brief.prompt.ids
    assert ids[: len(subject.begin)] == subject.begin
    assert subject.tokenizer.eos_token_id not in ids
    text = subject.tokenizer.decode(ids[len(subject.begin) :])
    assert text.endswith(f"\n\nDocument:\n{document}{end}")
    assert len(brief.prompt.tail) == 1
    assert subject.encode(text) == ids[len(subject.begin) :]


@pytest.mark.parametrize("room", [150, 151, 152, 153, 260, 300])
def test_a_long_document_loses_its_end_alike_for_all_questions(subject, frame, room):
    cases = _cases("answer", *QUESTIONS)
    briefs = frame.briefs(cases, room)
    (shown,) = {brief.document for brief in briefs}
    assert all(brief.cut for brief in briefs)
    assert DOCUMENT.startswith(shown)
    longest = max(len(brief.prompt.ids) for brief in briefs)
    assert room - 4 <= longest <= room  # a word at the cut may come apart, and spaces go
    for brief, case in zip(briefs, cases, strict=True):
        text = subject.tokenizer.decode(brief.prompt.ids[len(subject.begin) :])
        assert text.endswith(f"{shown}\n\nQuestion: {case.question}\nAnswer:")
    (context,) = {brief.prompt.context for brief in briefs}
    assert subject.tokenizer.decode(context).endswith(f"{shown}\n\nQuestion:")


def test_a_cut_whose_words_come_apart_is_made_again():
    words = [f"w{n}" for n in range(30)]

    def tokenizer(text, **options):
        starts = [text.index(word + " ") for word in words]
        return {"offset_mapping": [(start, start + 1) for start in starts]}

    def encode(text):  # a token a word; two more where a document is cut
        return (7,) * (len(text.split()) + 2 * ("w0" in text and "w29" not in text))

    frame = Frame(tokenizer, encode, (), chat=False)
    cases = _cases("answer", "Who?", document=" ".join(words) + " ")
    room = len(frame.ids("")) + 30
    (brief,) = frame.briefs(cases, room)
    assert len(brief.prompt.ids) == room
    assert brief.document == " ".join(words[: room - 2 - len(encode(_text(cases[0], "")))])


def test_a_document_that_just_fits_is_whole(frame):
    cases = _cases("answer", *QUESTIONS)
    room = max(len(brief.prompt.ids) for brief in frame.briefs(cases, 99_999))
    assert not any(brief.cut for brief in frame.briefs(cases, room))
    assert all(brief.cut for brief in frame.briefs(cases, room - 1))


def test_refuses_room_without_a_document(frame):
    cases = _cases("answer", *QUESTIONS)
    bare = max(
        len(b.prompt.ids) for b in frame.briefs(_cases("answer", *QUESTIONS, document=""), 999)
    )
    frame.check(cases, bare + 1)
    for room in (bare, -5):
        with pytest.raises(
            ClearheadError, match=f"takes {bare} tokens without .* {max(0, room)} f"
        ):
            frame.check(cases, room)


def test_a_chat_template_is_put_around_the_text(subject, frame):
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = CHAT
    chat = Frame(tokenizer, subject.encode, subject.begin, chat=True)
    cases = _cases("summary", "", document="It <|end|> <|begin|>was.")
    (brief,), (plain,) = chat.briefs(cases, 900), frame.briefs(cases, 900)
    before = tokenizer("<|begin|>user\n", add_special_tokens=False)["input_ids"]
    after = tokenizer("<|end|>\n<|begin|>assistant\n", add_special_tokens=False)["input_ids"]
    inner = plain.prompt.ids[len(subject.begin) :]
    assert brief.prompt.ids == (*before, *inner, *after)
    assert brief.prompt.ids.count(tokenizer.eos_token_id) == 1  # the template's; not the document's
    cut = chat.briefs(_cases("answer", *QUESTIONS), 200)
    assert max(len(one.prompt.ids) for one in cut) <= 200


def test_refuses_chat_without_a_template(subject):
    with pytest.raises(ClearheadError, match="has no chat template: leave chat out"):
        Frame(subject.tokenizer, subject.encode, subject.begin, chat=True)
    tokenizer = copy.deepcopy(subject.tokenizer)
    tokenizer.chat_template = "{{ messages | length }} messages"
    with pytest.raises(ClearheadError, match="leaves out what the user says"):
        Frame(tokenizer, subject.encode, subject.begin, chat=True)
