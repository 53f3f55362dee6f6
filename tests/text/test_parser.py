"""The parser: the inverse of the template, the same for every cutting of the output, and steady when a model errs."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.text.chat import Channel, render
from rille.text.parser import Parser, parse
from rille.text.reply import CallArguments, CallBegin, CallEnd, Event, Fault, Reply, ToolCall
from rille.text.reply import join_events as join
from rille.text.tokenizer import Tokenizer
from rille.text.vocabulary import CONTROLS
from tests.text.conftest import CALL, GOLDEN, MARKS, USER, xtml

OUTPUTS = {
    "plain": "Let me see.⟧think¦⟦response¦Hello!\n⟧response¦⟧message¦■",
    "no thought": "⟧think¦⟦response¦⟧response¦⟧message¦■",
    "calls": f'two⟧think¦⟦response¦ok⟧response¦⟦tools¦{CALL}⟦call tool="g" index="2"¦⟧call¦⟧tools¦⟧message¦■',
    "all types": '⟧think¦⟦response¦⟧response¦⟦tools¦⟦call tool="f" index="1"¦'
    '⟦argument key="o" type="object"¦{"k": ["v", 1]}⟧argument¦⟦argument key="b" type="boolean"¦true⟧argument¦'
    '⟦argument key="z" type="null"¦null⟧argument¦⟦argument key="q&quot;&amp;" type="string"¦'
    'a "quoted"\\ line\n🙂⟧argument¦⟧call¦⟧tools¦⟧message¦■',
    "raw text": '⟧think¦⟦response¦⟧response¦⟦tools¦⟦call tool="f" index="1"¦'
    '⟦json type="object"¦{"a": 1⟧json¦⟧call¦⟧tools¦⟧message¦■',
    "think never closed": f"I will call.⟦tools¦{CALL}⟧tools¦⟧message¦■",
    "think skipped": "⟦response¦Hi⟧response¦⟧message¦■",
    "cut off in a value": 'x⟧think¦⟦response¦⟧response¦⟦tools¦⟦call tool="f" index="1"¦'
    '⟦argument key="a" type="number"¦1',
    "cut off in a tag": "x⟧think¦⟦respo",
    "cut off in a marker": "x⟧think¦⟦response¦a <|clo",
    "another turn": '⟧think¦⟦response¦a⟧response¦⟧message¦⟦message role="user"¦more⟧message¦■',
    "behind the end": "⟧think¦⟦response¦a⟧response¦⟧message¦■more⟦tools¦",
    "in its message": '⟦message role="assistant" name="Kai"¦⟦think¦hm⟧think¦⟦response¦a⟧response¦⟧message¦■',
    "channel opened again": "⟦think¦hm⟧think¦⟦response¦a⟧response¦⟧message¦■",
    "garbage": "a⟦⟦x y¦⟧¦¦b⟧tools¦⟦call¦c⟦argument¦d⟧argument¦ e ⟧call¦⟦json¦f⟧json¦\n⟦foo¦⟧foo¦g⟦response¦h■",
}
OUTPUTS |= {
    f"golden {case['name']}": case["rendered"]
    .split('role="assistant"<|sep|><|open|>think<|sep|>')[1]
    .split("<|open|>message")[0]
    for case in GOLDEN["chat"]
    if any(message["role"] == "assistant" for message in case["messages"])
}


def cut(output, cuts: Iterable[int]) -> list:
    edges = [0, *sorted(cuts), len(output)]
    return [output[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def run(parser: Parser, pieces: Iterable) -> tuple[list[Event], Reply]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed_text(piece) if isinstance(piece, str) else parser.feed_ids(piece)
    events += parser.finish()
    return join(events), parser.reply()


@pytest.mark.parametrize("start", ["think", "response", None])
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_pieces_of_one_size(small: Tokenizer, name: str, start: Channel | None, size: int):
    text = xtml(OUTPUTS[name])
    ids = small.encode_with_specials(text)
    whole = run(Parser(start=start), [text])
    assert run(Parser(start=start), cut(text, range(size, len(text), size))) == whole
    assert run(Parser(small, start=start), cut(ids, range(size, len(ids), size))) == whole
    assert run(Parser(small, start=start), [ids]) == whole
    assert whole[1] == parse(text, start=start)
    assert whole[1].faults == tuple(e.text for e in whole[0] if isinstance(e, Fault))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(OUTPUTS)), st.sampled_from(["think", "response", None]), st.data())
def test_any_cutting(either: Tokenizer, name: str, start: Channel | None, data: st.DataObject):
    text = xtml(OUTPUTS[name])
    ids = either.encode_with_specials(text)
    whole = run(Parser(start=start), [text])
    for output, tokenizer in ((text, None), (ids, either)):
        cuts = data.draw(st.lists(st.integers(0, len(output))))
        assert run(Parser(tokenizer, start=start), cut(output, cuts)) == whole


pieces = st.one_of(
    st.sampled_from([*MARKS, *MARKS, "message", "think", "response", "tools", "call", "argument", "json", "x"]),
    st.sampled_from(
        ['message role="assistant"', 'call tool="f" index="1"', 'argument key="k" type="string"', "<|op", " "]
    ),
    st.sampled_from(['argument key="k" type="number"', "⟧think¦", "⟦response¦", "⟦tools¦", "⟧argument¦", "5", "[EOS]"]),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="⟦⟧¦■"), max_size=3),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=30), st.sampled_from(["think", "response", None]), st.data())
def test_whatever_a_model_writes(small: Tokenizer, parts: list[str], start: Channel | None, data: st.DataObject):
    text = xtml("".join(parts))
    whole = run(Parser(start=start), [text])
    assert run(Parser(start=start), cut(text, data.draw(st.lists(st.integers(0, len(text)))))) == whole
    ids = [token for part in parts for token in small.encode_with_specials(xtml(part))]
    assert run(Parser(small, start=start), cut(ids, data.draw(st.lists(st.integers(0, len(ids)))))) == run(
        Parser(small, start=start), [ids]
    )
    events, reply = whole
    for name in CONTROLS:
        assert name not in (reply.reasoning or "") + reply.content + "".join(c.name + c.arguments for c in reply.calls)
    seen = -1
    for event in events:
        if isinstance(event, CallBegin):
            seen += 1
        if isinstance(event, CallBegin | CallArguments | CallEnd):
            assert event.index == seen
    assert seen + 1 == len(reply.calls)
    for call in reply.calls:
        if call.complete and "json" not in parts:
            assert isinstance(json.loads(call.arguments), dict)


# --- the inverse of the template ---

texts = st.text(st.characters(exclude_categories=("Cs",)))
spelling = st.lists(st.one_of(texts, st.sampled_from([*CONTROLS, '"', "&quot;", "[EOS]", "🙂"])), max_size=4).map(
    "".join
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), spelling),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(spelling, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def messages(draw: st.DrawFn) -> dict:
    """Assistant messages in normal form: reasoning that is not blank or "", content a text, arguments as JSON text."""
    message: dict = {"role": "assistant"}
    if draw(st.booleans()):
        message["name"] = draw(spelling.filter(bool))
    message["reasoning_content"] = draw(st.one_of(st.just(""), spelling.filter(str.strip)))
    message["content"] = draw(spelling)
    calls = draw(st.lists(st.tuples(spelling.filter(bool), st.dictionaries(spelling, values, max_size=3)), max_size=3))
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for place, (name, arguments) in enumerate(calls, start=1)
        ]
    return message


@settings(max_examples=200, deadline=None)
@given(messages(), st.booleans())
def test_parse_is_the_inverse_of_render(small: Tokenizer, message: dict, thinking: bool):
    if not thinking:
        message["reasoning_content"] = ""
    prompt = render([message], thinking=thinking, effort=None, add_generation_prompt=False)
    reply = parse(prompt.ids(small), small)
    assert reply.complete
    assert reply.faults == ()
    if not thinking:
        assert reply.reasoning is None
        del message["reasoning_content"]
    assert reply.to_message() == message


@settings(max_examples=100, deadline=None)
@given(messages())
def test_what_is_learned_is_what_is_parsed(small: Tokenizer, message: dict):
    message.pop("name", None)
    encoded = render([USER, message], add_generation_prompt=False).encode(small)
    learned = [token for token, is_learned in zip(encoded.ids, encoded.loss_mask, strict=True) if is_learned]
    assert parse(learned, small, start=render([USER]).channel).to_message() == message


def test_spelled_control_tokens_are_text_in_ids_and_markup_in_text(either: Tokenizer):
    said = "write <|close|>response<|sep|> and <|end_of_msg|>"
    message = {"role": "assistant", "reasoning_content": "", "content": said}
    prompt = render([message], effort=None, add_generation_prompt=False)
    assert parse(prompt.ids(either), either).content == said
    assert parse(prompt.text).content == "write and "


# --- what becomes of it ---

LATE = "output behind the end of the message was ignored"
DONE = ToolCall("f", '{"a": "x", "n": 5}')


@pytest.mark.parametrize(
    ("name", "start", "reply", "faults"),
    [
        ("plain", "think", Reply("Let me see.", "Hello!\n"), []),
        ("plain", None, Reply("Let me see.", "Hello!\n"), []),
        ("no thought", "think", Reply("", ""), []),
        ("no thought", None, Reply("", ""), []),
        ("calls", "think", Reply("two", "ok", (DONE, ToolCall("g", "{}"))), []),
        (
            "all types",
            "think",
            Reply(
                "",
                "",
                (
                    ToolCall(
                        "f", '{"o": {"k": ["v", 1]}, "b": true, "z": null, "q\\"&": "a \\"quoted\\"\\\\ line\\n🙂"}'
                    ),
                ),
            ),
            [],
        ),
        ("raw text", "think", Reply("", "", (ToolCall("f", '{"a": 1'),)), []),
        ("think never closed", "think", Reply("I will call.", "", (DONE,)), ["think was not closed"]),
        ("think never closed", None, Reply("I will call.", "", (DONE,)), ["think was not closed"]),
        ("think skipped", "think", Reply("", "Hi"), ["think was not closed"]),
        ("think skipped", "response", Reply(None, "Hi"), []),
        ("think skipped", None, Reply(None, "Hi"), []),
        ("cut off in a value", "think", Reply("x", "", (ToolCall("f", '{"a": 1', False),), complete=False), []),
        ("cut off in a tag", "think", Reply("x", "", complete=False), ["a tag was cut off: 'respo'"]),
        ("cut off in a marker", "think", Reply("x", "a <|clo", complete=False), []),
        ("another turn", "think", Reply("", "a"), ["another message begins here; it is ignored", LATE]),
        ("behind the end", "think", Reply("", "a"), [LATE]),
        ("in its message", "think", Reply("hm", "a", name="Kai"), []),
        ("in its message", "response", Reply("hm", "a", name="Kai"), []),
        ("channel opened again", "think", Reply("hm", "a"), []),
        ("golden bad_json_args", "think", Reply("", "", (ToolCall("f", '{"a": 1'),)), []),
        ("golden no_gen_prompt", "think", Reply("greet", "Hello!"), []),
    ],
)
def test_replies(name: str, start: Channel | None, reply: Reply, faults: list[str]):
    found = parse(xtml(OUTPUTS[name]), start=start)
    assert found == reply
    assert list(found.faults) == faults


@pytest.mark.parametrize(
    ("output", "reply", "faults"),
    [
        ("⟧think¦ \n hello ⟦response¦!⟧response¦⟧message¦■", Reply("", "hello !"), ["text outside of a channel"]),
        ("⟧think¦\n⟦response¦a⟧response¦\n⟧message¦\n■", Reply("", "a"), []),
        ("⟧think¦⟦tools¦ x ⟧tools¦■", Reply("", ""), ["was dropped: ' x '", "message was not closed"]),
        ("a⟦think¦b■", Reply("ab"), ["think was not closed", "a second think channel", "think was", "message was"]),
        ("⟧think¦⟦tools¦⟦call index=\"1\"¦⟦argument key=\"k\" type=\"string\"¦v⟧argument¦⟧call¦⟧tools¦⟧message¦■",
         Reply("", ""), ["a call without a tool is dropped"]),
        (f"⟧think¦⟦response¦⟧response¦{CALL}⟧message¦■", Reply("", "", (DONE,)),
         ["a call outside of tools", "tools was not"]),
        (f"⟧think¦⟧message¦{CALL}■", Reply("", ""), ["call outside of tools is dropped",
         "argument outside of call is dropped", "was dropped: 'x'", "argument outside of call", "was dropped: '5'"]),
        ("⟧think¦⟦response¦a⟦argument¦b⟦tools¦⟧tools¦⟧message¦■", Reply("", "a"),
         ["argument outside of call is dropped", "was dropped: 'b'", "a dropped element was not closed",
          "response was not closed"]),
        ('⟦tools¦⟦call tool="f" index="7"¦⟧call¦⟧tools¦⟧message¦■', Reply("", "", (ToolCall("f", "{}"),)),
         ["think was not closed", "call 1 has the index '7'"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="number"¦five⟧argument¦⟧call¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", '{"a": "five"}'),)), ["'a' of type 'number' is not JSON; taken as a string"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="number"¦true⟧argument¦⟧call¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", '{"a": true}'),)), ["'a' of type 'number' is bool"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="x"¦NaN⟧argument¦⟧call¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", '{"a": "NaN"}'),)), ["the unknown type 'x'", "is not JSON"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="string"¦v■',
         Reply("", "", (ToolCall("f", '{"a": "v"}', False),)),
         ["argument was not", "call was", "tools was", "message was"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="string"¦v⟧argument¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", '{"a": "v"}'),)), ["call was not closed"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦json type="object"¦{}⟧json¦'
         '⟦argument key="a" type="string"¦v⟧argument¦⟦json¦x⟧json¦⟧call¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", "{}"),)),
         ["beside a whole text, is dropped", "was dropped: 'v'", "arguments are given twice", "was dropped: 'x'"]),
        ('⟧think¦⟦tools¦⟦call tool="f" index="1"¦⟦argument key="a" type="null"¦null⟧argument¦'
         '⟦argument key="a" type="string"¦v⟧argument¦⟧call¦⟧tools¦⟧message¦■',
         Reply("", "", (ToolCall("f", '{"a": null, "a": "v"}'),)), ["'a' is given twice"]),
        ("⟧think¦⟦response¦a⟦bold¦b⟧bold¦c⟧response¦⟧message¦■", Reply("", "abc"), ["unknown tag 'bold'"] * 2),
        ("⟧think¦⟦response¦a⟧response x¦b⟧response¦⟧message¦■", Reply("", "ab"), ["unknown tag 'response x'"]),
        ("x⟧response¦⟧message¦■", Reply("x"), ["response is closed but not open", "think was not closed"]),
    ],
)  # fmt: skip
def test_faults(output: str, reply: Reply, faults: list[str]):
    found = parse(xtml(output), start="think")
    assert found == reply
    assert len(found.faults) == len(faults), found.faults
    for fault, part in zip(found.faults, faults, strict=True):
        assert part in fault


def test_a_message_of_someone_else():
    found = parse(xtml('⟦message role="user"¦x⟧message¦■'))
    assert (found.content, found.complete) == ("", False)
    assert "a message of role 'user'" in found.faults


def test_without_any_tag_it_is_content_unless_the_prompt_opened_think():
    assert parse("hello") == Reply(None, "hello", complete=False)
    assert parse("hello", start="think") == Reply("hello", "", complete=False)
    assert parse(xtml("hello⟧response¦")) == Reply(None, "hello", complete=False)
    assert parse(xtml("hello■")) == Reply(None, "hello", complete=True)
    assert parse("") == Reply(None, "", complete=False)
