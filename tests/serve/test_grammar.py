"""Grammars as masks: every token of a valid answer is let through, whatever is drawn from the mask parses, and what was
tried can be taken back."""

import json
import random

import numpy as np
import pytest

from rille.serve.grammar import Vocabulary
from rille.text.chat import render
from rille.text.grammar import Grammar, continuations
from rille.text.markup import escape
from rille.text.parser import parse
from rille.text.tokenizer import train_tokenizer
from tests.serve.scripted import reply_ids

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ENDING = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the city of Rome and Oslo", '{"ok": true}' * 20], 400, note=lambda text: None)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer)


def answer(tokenizer, message, **options):
    rendered = render([USER, {"role": "assistant", **message}], add_generation_prompt=False, **options)
    encoded = rendered.encode(tokenizer)
    return [token for token, produced in zip(encoded.ids, encoded.loss_mask, strict=True) if produced]


CASES = [
    ({"reasoning": "hm", "content": '{"ok":true}'}, {"response_format": JSON_FORM}),
    ({"reasoning": "hm", "content": "", "tool_calls": [CALL]}, {"tools": [TOOL]}),
    ({"reasoning": "", "content": "both", "tool_calls": [CALL, CALL]}, {"tools": [TOOL], "tool_choice": "required"}),
    ({"reasoning": "free", "content": "text"}, {}),
]


@pytest.mark.parametrize("message, options", CASES)
def test_every_token_of_a_valid_answer_is_allowed(tokenizer, vocabulary, message, options):
    matcher = vocabulary.matcher(continuations("think", options.get("tools", ()), **without_tools(options)))
    for token in answer(tokenizer, message, **options):
        allowed = matcher.allowed()
        assert allowed.any() and allowed[token]
        matcher.accept(token)
    assert matcher.is_over and not matcher.allowed().any()


@pytest.mark.parametrize("word", ["_id", "$filter", "id_", "x-", "<|close|>", "(x)", "#", 'q"', "&"])
def test_names_that_merge_with_their_quotes_keep_the_cuts_of_the_format(word):
    """Here `="` or `"` and the word's own punctuation are one token for the tokenizer, and two in the format."""
    cuts = ['="', escape(word), '"']
    tokenizer = train_tokenizer(["".join(cuts) + " \n"] * 400, 400, note=lambda text: None)
    assert len(tokenizer.encode("".join(cuts))) < sum(len(tokenizer.encode(piece)) for piece in cuts)
    schema = {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]}
    tool = {"type": "function", "function": {"name": word, "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": word, "arguments": {word: word}}}
    message = {"reasoning": "hm", "content": "", "tool_calls": [call]}
    matcher = Vocabulary(tokenizer).matcher(continuations("think", [tool], tool_choice="required"))
    tokens = answer(tokenizer, message, tools=[tool])
    for token in tokens:
        assert matcher.allowed()[token], tokenizer.decode([token])
        matcher.accept(token)
    assert matcher.is_over


def without_tools(options):
    return {key: value for key, value in options.items() if key != "tools"}


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_mask_lets_through_parses(tokenizer, vocabulary, seed):
    """Draws among the allowed tokens, mostly towards the end; two grammars advance in turn."""
    draws = random.Random(seed)
    grammars = [
        continuations("response", [TOOL], tool_choice="required"),
        continuations("response", response_format=JSON_FORM),
    ]
    matchers, written = [vocabulary.matcher(grammar) for grammar in grammars], [[], []]
    for _ in range(2000):
        for matcher, ids in zip(matchers, written, strict=True):
            if not matcher.is_over:
                options = np.flatnonzero(matcher.allowed())
                specials = [token for token in options if tokenizer.special_name(int(token))]
                visible = [token for token in options if tokenizer.token_bytes(int(token)).strip()]
                ids.append(int(draws.choice(specials or visible or options)))
                matcher.accept(ids[-1])
    assert all(matcher.is_over for matcher in matchers)
    called, plain = (parse(ids, tokenizer, start="response") for ids in written)
    arguments = json.loads(called.calls[0].arguments)
    assert called.calls[0].name == "weather" and arguments["city"] in ("Rome", "Oslo")
    assert set(json.loads(plain.content)) == {"ok"}


def test_what_is_tried_on_a_copy_moves_nothing(tokenizer, vocabulary):
    matcher = vocabulary.matcher(continuations("response", response_format=JSON_FORM))
    ids = tokenizer.encode('{"ok":fal')
    everything = [*tokenizer.encode('{"ok":true}'), *tokenizer.encode_with_specials(ENDING)]
    before = matcher.allowed()
    for count in range(1, len(everything) + 1):
        tried = matcher.copy()
        for token in everything[:count]:
            tried.accept(token)
        assert tried.is_over == (count == len(everything)) and not matcher.is_over
        assert np.array_equal(before, matcher.allowed()), count
    assert matcher.count_valid([*ids, *tokenizer.encode("x")]) == len(ids)
    for token in ids:
        matcher.accept(token)
    assert not np.array_equal(before, matcher.allowed())


def test_a_copy_goes_its_own_way(tokenizer, vocabulary):
    """From the same place, and lets through at each step what one that was compiled for it does; so does a copy of it
    from wherever it has come to."""
    grammar = continuations("response", response_format=JSON_FORM)
    first = vocabulary.matcher(grammar, '{"ok":')
    pairs = []
    for place, text in enumerate(("true}", "false}", "true}")):
        ids = [*tokenizer.encode(text), *tokenizer.encode_with_specials(ENDING)]
        pairs.append((first.copy() if place else first, vocabulary.matcher(grammar, '{"ok":'), ids))
    for step in range(max(len(ids) for _, _, ids in pairs)):
        for mine, other, ids in pairs:
            for token in ids[step : step + 1]:
                mine.accept(token)
                other.accept(token)
            assert np.array_equal(mine.copy().allowed(), other.allowed()) and mine.copy().is_over == other.is_over
            assert np.array_equal(mine.allowed(), other.allowed())
    assert all(mine.is_over for mine, _, _ in pairs)


def test_a_partial_message_is_read_first(tokenizer, vocabulary):
    grammar = continuations("response", response_format=JSON_FORM)
    matcher = vocabulary.matcher(grammar, '{"ok":tr')
    assert matcher.count_valid(tokenizer.encode("ue}")) == len(tokenizer.encode("ue}"))
    with pytest.raises(ValueError, match="not '{\"no"):
        vocabulary.matcher(grammar, '{"no')


@pytest.mark.parametrize("endless", ["b: b", "b: c\nc: b", 'b: "x" b'])
def test_where_nothing_can_follow_nothing_is_allowed(tokenizer, vocabulary, endless):
    """The compiler lets the stop token through there: a reply would end as if it were complete."""
    matcher = vocabulary.matcher(Grammar(f'start: "a" b\n{endless}\n'))
    matcher.accept(tokenizer.encode("a")[0])
    stop = tokenizer.specials["<|end_of_msg|>"]
    assert not matcher.allowed()[stop] and not matcher.count_valid([stop])
    assert matcher.allowed().any() == ("x" in endless)
    whole = vocabulary.matcher(Grammar('start: "a"\n'))
    whole.accept(tokenizer.encode("a")[0])
    assert np.flatnonzero(whole.allowed()).tolist() == [stop]


NOT_HELD = [
    {"uniqueItems": True, "type": "array", "items": {"type": "integer"}},
    {"propertyNames": {"type": "string"}, "type": "object", "additionalProperties": {}},
    {"not": {"required": ["b"]}, "type": "object"},
    {"if": {}, "type": "object"},
    {"then": {"required": ["b"]}, "type": "object"},
    {"contains": {"type": "integer"}, "type": "array"},
    {"dependentRequired": {"b": ["c"]}, "type": "object"},
    {"unevaluatedProperties": False, "type": "object"},
    {"format": "phone", "type": "string"},
    {"format": "uri-reference", "anyOf": [{"type": "string"}, {"type": "null"}]},
    {"pattern": "^(?!x)a", "type": "string"},
    {"pattern": r"^(a|b)\1$", "type": "string"},
    {"pattern": r"\bword\b", "type": "string"},
    {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
    {"oneOf": [{"required": ["b"]}, {"required": ["c"]}], "anyOf": [{"type": "object"}, {"type": "null"}]},
    {"minimum": -(2**63), "type": "integer"},
    {"maximum": 3.4e38, "type": "number"},
    {"exclusiveMinimum": 5e-324, "type": "number"},
    {"$dynamicRef": "#node"},
]
HELD = [
    {"type": "integer", "format": "int64"},
    {"type": "array", "uniqueItems": False},
    {"type": "string", "pattern": "^(?:a|b)c$"},
    {"type": "string", "pattern": r"^a\\b$"},
    {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
    {"type": "string", "format": "date-time"},
    {
        "type": "object",
        "properties": {"not": {"type": "integer"}, "if": {"enum": [{"contains": 1}]}},
        "required": ["if"],
    },
    {"type": "object", "properties": {"pattern": {"type": "string"}, "format": {"type": "string"}}},
]


@pytest.mark.parametrize("schema", [*NOT_HELD, *HELD], ids=str)
@pytest.mark.parametrize("depth", [1, 3])
def test_tools_that_ask_more_than_a_grammar_holds_can_be_called_all_the_same(vocabulary, schema, depth):
    """Their schemas are not this server's to choose; what is not held is said in `loose`, and names are no keywords."""
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    parameters = {"type": "object", "properties": {"x": schema}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = continuations("think", [tool])
    assert vocabulary.matcher(grammar).allowed().any()
    lost = [next(iter(one)) for one in NOT_HELD if str(one) in str(schema)]
    assert [note.split()[1] for note in grammar.loose] == lost


def test_a_form_that_asks_more_than_a_grammar_holds_is_refused(vocabulary):
    """It is this request's own, and its reply must be what it says."""
    for schema in ({"type": "array", "uniqueItems": True}, {"type": "string", "format": "phone"}):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        with pytest.raises(ValueError, match="does not compile: failed to compile JSON schema: Un"):
            vocabulary.matcher(continuations("response", response_format=form))


def test_faults_are_named(tokenizer, vocabulary):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a"}}}
    with pytest.raises(ValueError, match=r"regex parse error: \(a \^ error: unclosed group$"):
        vocabulary.matcher(continuations("response", response_format=form))
    with pytest.raises(ValueError, match="does not compile"):
        vocabulary.matcher(Grammar("start: nowhere"))
    matcher = vocabulary.matcher(continuations("response", response_format=JSON_FORM))
    with pytest.raises(ValueError, match="does not allow token"):
        matcher.accept(tokenizer.encode("x")[0])


def test_names_and_values_of_any_characters_can_be_written(tokenizer, vocabulary):
    """The grammar's own text has them in quotes, some of which its lexer would not take as they are."""
    odd = [f"a{chr(code)}b" for code in (*range(48), 92, 127, 133, 0x2028, 0xFFFE, 0x1F642)]
    properties = {name: {"enum": odd} for name in odd}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    matcher = vocabulary.matcher(continuations("response", [tool]))
    for name, value in zip(odd, reversed(odd), strict=True):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {name: value}}}
        ids = reply_ids(tokenizer, thinking=False, content="", tool_calls=[call])
        assert matcher.count_valid(ids) == len(ids), (name, value)
