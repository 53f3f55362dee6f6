"""The parser while the model is writing: what comes when, whole characters, other special tokens."""

import pytest

from rille.text.parser import Parser, parse
from rille.text.reply import CallArguments, CallBegin, CallEnd, Content, End, Fault, Reasoning, Reply, ToolCall
from rille.text.reply import join_events as join
from rille.text.tokenizer import Tokenizer
from tests.text.conftest import CALL, xtml


def test_events_in_order():
    parser = Parser(start="think")
    assert parser.feed_text("hm") == [Reasoning("hm")]
    assert parser.feed_text("m<|cl") == [Reasoning("m")]
    assert parser.feed_text(xtml("ose|>think¦⟦response")) == []
    assert parser.feed_text(xtml('¦Hi⟧response¦⟦tools¦⟦call tool="get')) == [Content("Hi")]
    assert parser.feed_text(xtml('_it" index="1"¦')) == [CallBegin(0, "get_it")]
    assert parser.feed_text(xtml('⟦argument key="a" type="string"¦x"')) == [CallArguments(0, '{"a": "x\\"')]
    assert parser.feed_text(xtml('⟧argument¦⟦argument key="n" type="number"¦1')) == [CallArguments(0, '", "n": ')]
    assert parser.feed_text("2") == []
    assert parser.feed_text(xtml("⟧argument¦")) == [CallArguments(0, "12")]
    assert parser.feed_text(xtml("⟧call¦⟧tools¦⟧message¦")) == [CallArguments(0, "}"), CallEnd(0, True)]
    assert not parser.done
    assert parser.feed_text(xtml("■")) == [End()]
    assert parser.done
    assert parser.finish() == []
    assert parser.reply() == Reply("hmm", "Hi", (ToolCall("get_it", '{"a": "x\\"", "n": 12}'),))


def test_reply_so_far():
    parser = Parser(start="think")
    parser.feed_text(xtml("hm⟧think¦⟦response¦Hel"))
    assert parser.reply() == Reply("hm", "Hel", complete=False)


def test_characters_stay_whole(either: Tokenizer):
    ids = either.encode_with_specials(xtml("é🙂中⟧think¦⟦response¦🙂"))
    parser = Parser(either, start="think")
    events = [event for token in ids for event in parser.feed_ids([token])]
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "é🙂中"
    assert "\ufffd" not in "".join(getattr(e, "text", "") for e in events)


def test_a_broken_character_ends_where_markup_begins(small: Tokenizer):
    first = small.encode("é")[0]
    ids = [first, *small.encode_with_specials(xtml("⟧think¦⟦response¦")), first]
    assert parse(ids, small, start="think") == Reply("\ufffd", "\ufffd", complete=False)


def test_other_special_tokens(small: Tokenizer):
    picture, end = small.specials["<|media_pad|>"], small.eos_id
    ids = [*small.encode("a"), picture, *small.encode("b"), end, *small.encode("c")]
    found = parse(ids, small, start="think")
    assert found == Reply("ab", complete=False)
    assert found.faults[0] == "special token <|media_pad|> in the output"
    assert found.faults[1] == "special token <|end_of_text|> in the output"
    assert found.faults[-1] == "output behind the end of the message was ignored"


def test_calls_of_a_request_without_tools():
    output = xtml(f"⟧think¦⟦response¦a⟧response¦⟦tools¦{CALL}{CALL}⟧tools¦⟧message¦■")
    parser = Parser(start="think", drop_calls=True)
    events = join([*parser.feed_text(output), *parser.finish()])
    dropped = Fault("a call of 'f' is dropped: the request declares no tools")
    assert events == [Content("a"), dropped, dropped, End()]
    assert parser.reply() == Reply("", "a")
    assert len(parse(output, start="think").calls) == 2


def test_ids_need_their_tokenizer(small: Tokenizer):
    with pytest.raises(ValueError, match="give the parser their tokenizer"):
        parse([1, 2])
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
        parse([10**6], small)


def test_reply_as_message():
    reply = Reply(None, "a", (ToolCall("f", "{}"), ToolCall("g", "{}")))
    message = reply.to_message(call_id=lambda place: f"functions:{place}")
    assert [c["id"] for c in message["tool_calls"]] == ["functions:1", "functions:2"]
    assert "reasoning_content" not in message
    assert Reply("", "").to_message() == {"role": "assistant", "reasoning_content": "", "content": ""}
