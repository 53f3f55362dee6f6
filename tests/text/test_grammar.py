"""The grammar of what may be written next: well formed, true to the schemas, and (with llguidance) it lets every valid
answer through and nothing else."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.text.chat import declared_tools, render
from rille.text.grammar import Grammar, continuations
from rille.text.schema import TYPES, Variant, loose_keywords, variants
from tests.text.conftest import CLOCK, USER, call
from tests.text.test_official import BYTES

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "k": {"type": "string"}}, "required": ["k"]}
SEARCH = {
    "type": "function",
    "function": {
        "name": 'search "all"',
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for", "minLength": 1, "maxLength": 20},
                "limit": {"type": "integer", "minimum": 1},
                "unit": {"enum": ["a&b", 'c"d', "", None, 3]},
                "node": {"$ref": "#/$defs/node"},
                "any": {},
                "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]},
            },
            "required": ["query", "limit"],
            "$defs": {"node": NODE},
        },
    },
}
OPEN_TOOL = {
    "type": "function",
    "function": {"name": "open", "parameters": {"properties": {"a": True}, "additionalProperties": {"type": "null"}}},
}
WIDE = {
    "type": "function",
    "function": {
        "name": "wide",
        "parameters": {"properties": {f"p{i}": {"type": "boolean"} for i in range(70)}, "required": ["p69"]},
    },
}
TOOLS = [SEARCH, CLOCK, OPEN_TOOL, WIDE]
OPTIONS = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "none", "response_format": "json_object"},
    {
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"schema": NODE | {"$defs": {"node": NODE}}}},
    },
]

# --- without a compiler ---

_PIECE = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?<=: )/(?:[^/\\]|\\.)*/$|%json .*$|%if \w+\([^)]*\)|<\|\w+\|>|[\w:]+(?:\(\d+\))?|[|()?*+]',
    re.MULTILINE,
)


def rules_of(grammar: Grammar) -> dict[str, list[str]]:
    """Each rule's body in pieces; anything that is no piece is an error in the grammar's text."""
    rules: dict[str, list[str]] = {}
    for statement in re.split(r"\n(?=\w+(?:::_)?: )", grammar.lark.rstrip("\n")):
        name, body = statement.split(": ", 1)
        assert name not in rules, f"{name} is defined twice"
        assert _PIECE.sub("", ": " + body).strip(" :\n") == ""
        rules[name.removesuffix("::_")] = _PIECE.findall(": " + body)[1:]
    return rules


@pytest.mark.parametrize("start", ["think", "response"])
@pytest.mark.parametrize("options", OPTIONS)
def test_grammars_are_well_formed(start, options: dict):
    grammar = continuations(start, **options)
    rules = rules_of(grammar)
    used: set[str] = set()
    for body in rules.values():
        assert body.count("(") == body.count(")")
        for piece in body:
            if piece.startswith("%json "):
                json.loads(piece.removeprefix("%json "))
            elif piece.startswith("<"):
                assert piece in grammar.specials
            elif piece.startswith('"'):
                json.loads(piece)
            elif re.match(r"\w", piece):
                used.add(piece.split("::")[0])
    assert used - {*rules} == set()
    assert {*rules} - used == {"start"}


def test_what_the_options_change():
    plain = rules_of(continuations("think"))
    assert "tools" not in plain
    assert plain["start"][0] == "TEXT"
    assert rules_of(continuations("response"))["start"] == ["answer"]
    assert "?" in rules_of(continuations("think", TOOLS))["answer"]
    assert "?" not in rules_of(continuations("think", TOOLS, tool_choice="required"))["answer"]
    assert "tools" not in rules_of(continuations("think", TOOLS, tool_choice="none"))
    asked = rules_of(continuations("think", TOOLS, response_format="json_object"))
    assert asked["asked"] == ['%json {"type":"object"}']
    assert "TEXT" not in asked["answer"]


def test_tools_of_later_system_messages_are_in_it():
    messages = [USER, {"role": "system", "tools": [CLOCK]}, USER]
    tools = declared_tools(messages, [SEARCH])
    assert [tool["function"]["name"] for tool in tools] == ['search "all"', "clock"]
    assert 'call tool=\\"clock\\"' in continuations("think", tools).lark
    assert declared_tools([USER]) == []


def test_what_it_does_not_enforce_is_said():
    properties = {"p": {"type": "string", "pattern": "^a", "format": "date"}, "n": {"type": "number", "pattern": "x"}}
    properties["q"] = {"type": "string", "minLength": 1, "maxLength": 10_000}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties, "not": {}}}}
    assert continuations("think", [tool]).loose == (
        "f: not of the parameters",
        "f.p: pattern '^a'",
        "f.p: format 'date'",
        "f.q: minLength 1",
        "f.q: maxLength 10000",
    )
    assert continuations("think", TOOLS).loose == (
        "open: a further argument may repeat a declared one",
        "wide: any order of more than 64 arguments (the order is fixed)",
    )


DEEP = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(20)} | {"20": {"type": "integer"}}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], "tool 'f': parameters and their properties must be objects"),
        ({"properties": []}, "must be objects"),
        ({"required": "a"}, "tool 'f': required must be a list of names"),
        ({"properties": {"a": {"anyOf": {}}}}, "anyOf must be of type list, not {}"),
        ({"properties": {"a": {"type": 5}}}, "the type 5"),
        ({"additionalProperties": {"type": "date"}}, "further arguments: a schema has the type 'date'"),
        ({"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}}}, "no value fits"),
        ({"properties": {"a": False}}, "no value fits the schema of argument 'a'"),
        ({"properties": {"a": {"type": "date"}}}, "argument 'a': a schema has the type 'date'; types are string"),
        ({"properties": {"a": ["string"]}}, "a schema must be an object, true or false"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "'#/\\$defs/x' leads nowhere"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "points outside of its schema"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "tool 'f': a part of the schema refers to itself"),
        ({"properties": {"a": {"items": {"$ref": "#/properties/a/items"}}}}, "refers to itself before any value"),
        ({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": DEEP}, "more than 16 deep"),
    ],
)
def test_schemas_that_have_no_grammar(parameters, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        continuations("think", [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert "\n" not in str(caught.value)


def test_options_are_checked():
    with pytest.raises(ValueError, match="needs tools"):
        continuations("think", tool_choice="required")
    with pytest.raises(ValueError, match="'any' is not one of"):
        continuations("think", TOOLS, tool_choice="any")
    with pytest.raises(ValueError, match="declared twice"):
        continuations("think", [CLOCK, CLOCK])
    with pytest.raises(ValueError, match="'xml' is not one of"):
        continuations("think", response_format="xml")


WORDS = "type properties required anyOf oneOf allOf enum const $ref minLength additionalProperties a string".split()
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([*WORDS, "#", "#/a", "integer", ""])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(anything, st.fixed_dictionaries({"properties": st.fixed_dictionaries({"a": anything})})))
def test_any_schema_has_a_grammar_or_is_refused_in_one_line(parameters):
    try:
        grammar = continuations("think", [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        assert "call_0" in rules_of(grammar)
    except ValueError as error:
        assert "\n" not in str(error)


# --- schemas by type ---


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer", "description": "d"}, [("number", {"type": "integer"})]),
        ({"type": ["string", "null"]}, [("string", {"type": "string"}), ("null", {"type": "null"})]),
        ({"type": ["integer", "number"]}, [("number", {"type": "number"})]),
        ({"const": "a"}, [("string", {"enum": ["a"]})]),
        ({"enum": [True, 1, "x", 1.5, None]}, [("string", {"enum": ["x"]}), ("number", {"enum": [1, 1.5]}),
                                               ("boolean", {"enum": [True]}), ("null", {"enum": [None]})]),
        ({"type": "string", "enum": ["x", 1]}, [("string", {"enum": ["x"]})]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}, False], "title": "t", "minLength": 2},
         [("string", {"type": "string", "minLength": 2}), ("null", {"type": "null", "minLength": 2})]),
        ({"anyOf": [{"type": "null"}, {"type": "null"}]}, [("null", {"type": "null"})]),
        ({"$ref": "#/$defs/s", "maxLength": 3}, [("string", {"type": "string", "maxLength": 3})]),
        ({"allOf": [{"type": ["string", "number"]}, {"minimum": 1, "type": "number"}]},
         [("number", {"type": "number", "allOf": [{"type": ["string", "number"]}, {"minimum": 1, "type": "number"}]})]),
        (False, []),
        (True, [(kind, {"type": kind}) for kind in TYPES]),
    ],
)  # fmt: skip
def test_variants(schema, expected: list):
    found = variants(schema, {"$defs": {"s": {"type": "string"}}})
    assert found == [Variant(*pair) for pair in expected]


def test_references_bring_what_they_point_into():
    root = {"properties": {"n": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
    (found,) = variants(root["properties"]["n"], root)
    assert found.schema["properties"]["next"] == {"$ref": "#/$defs/part0"}
    assert found.schema["$defs"] == {"part0": {**NODE, "properties": found.schema["properties"]}}
    assert loose_keywords([found]) == []


# --- with the compiler, where it is installed ---


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory):
    """Makes a matcher of a grammar, over a vocabulary of the official form that knows single bytes only."""
    llguidance = pytest.importorskip("llguidance", reason="llguidance, which compiles grammars, is not installed")
    import tiktoken
    from llguidance.tiktoken import lltokenizer_from_encoding

    from rille.text.tokenizer import load_tokenizer
    from tests.text.test_official import write_ranks

    tokenizer = load_tokenizer(write_ranks(tmp_path_factory.mktemp("bytes"), BYTES))
    ranks = {word: rank for rank, word in enumerate(BYTES)}
    encoding = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens=tokenizer.specials)
    vocabulary = lltokenizer_from_encoding(encoding, eos_token=tokenizer.specials["<|end_of_msg|>"])

    def matcher(grammar: Grammar):
        made = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar.lark))
        assert made.get_error() == ""
        return made

    return tokenizer, matcher


def answer(tokenizer, message: dict, **options) -> list[int]:
    """The ids that the assistant must produce for a message."""
    encoded = render([USER, {"role": "assistant", **message}], add_generation_prompt=False, **options).encode(tokenizer)
    return [token for token, is_produced in zip(encoded.ids, encoded.loss_mask, strict=True) if is_produced]


def accepts(compiler, grammar: Grammar, message: dict, **options) -> bool:
    tokenizer, matcher = compiler
    ids = answer(tokenizer, message, **options)
    return matcher(grammar).validate_tokens(ids) == len(ids)


def calls(**arguments) -> dict:
    return {"content": "", "tool_calls": [call('search "all"', arguments=arguments)]}


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ({"content": "Hello <|close|>\n"}, True),
        ({"reasoning": "hm\n🙂", "content": ""}, True),
        (calls(query="x", limit=1), True),
        (calls(limit=1, query='"quoted" &'), True),
        (calls(node={"k": "a", "next": {"k": "b"}}, limit=5, either=[1, 2.5], query="x", any={"a": [None]}), True),
        (calls(limit=1, query="x", unit=None, either="[", any=""), True),
        (calls(limit=1, query="x", unit='c"d'), True),
        (calls(limit=1, query="x", unit=""), True),
        (calls(limit=1, query="x", unit=3), True),
        (
            {"tool_calls": [call("clock"), call("clock", arguments={"q": 1, "z": "x"}), call("open", arguments={})]},
            True,
        ),
        ({"tool_calls": [call("open", arguments={"b": None, "a": [1], "c": None})]}, True),
        ({"tool_calls": [call("wide", arguments={"p69": True, "p0": False, "p5": True})]}, True),
        (calls(query="x"), False),
        (calls(limit=1, query=""), False),
        (calls(limit=1, query="x" * 21), False),
        (calls(limit=0, query="x"), False),
        (calls(limit=1.5, query="x"), False),
        (calls(limit="1", query="x"), False),
        (calls(limit=1, query="x", unit="b"), False),
        (calls(limit=1, query="x", node={}), False),
        (calls(limit=1, query="x", either=["a"]), False),
        (calls(limit=1, query="x", other=1), False),
        ({"tool_calls": [call("nope")]}, False),
        ({"tool_calls": [call("open", arguments={"b": 1})]}, False),
        ({"tool_calls": [call("wide", arguments={"p0": True})]}, False),
    ],
)
def test_answers(compiler, message: dict, accepted: bool):
    for start, thinking in (("think", True), ("response", False)):
        grammar = continuations(start, TOOLS)
        assert accepts(compiler, grammar, message, thinking=thinking) == accepted
        assert not accepts(compiler, grammar, message, thinking=not thinking)


def test_an_argument_is_given_once(compiler):
    tokenizer, matcher = compiler
    ids = answer(tokenizer, calls(limit=1, query="x"))
    text = tokenizer.decode(ids)
    start = text.index('<|open|>argument key="limit"')
    end = text.index("<|close|>call")
    twice = tokenizer.encode_with_specials(text[:end] + text[start:end] + text[end:])
    assert matcher(continuations("think", TOOLS)).validate_tokens(twice) < len(twice)


def test_tool_choice_and_response_format(compiler):
    text, called = {"content": "hi"}, {"content": "", "tool_calls": [call("clock")]}
    json_text, other = {"content": '{"k": "v"}'}, {"content": '{"k": 1}'}
    required = continuations("think", TOOLS, tool_choice="required")
    assert [accepts(compiler, required, m) for m in (text, called)] == [False, True]
    none = continuations("think", TOOLS, tool_choice="none")
    assert [accepts(compiler, none, m) for m in (text, called)] == [True, False]
    schema = {"type": "json_schema", "json_schema": {"schema": NODE | {"$defs": {"node": NODE}}}}
    asked = continuations("think", TOOLS, response_format=schema)
    assert [accepts(compiler, asked, m) for m in (text, called, json_text, other)] == [False, True, True, False]
    free = continuations("response", response_format="json_object")
    assert accepts(compiler, free, other, thinking=False)


@pytest.mark.parametrize("format", [None, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}])
def test_every_token_of_an_answer_is_allowed_when_its_turn_comes(compiler, format):
    tokenizer, matcher = compiler
    message = calls(query="x", limit=12) | {"reasoning": "first I look", "content": '{"a": [1, "é"]}'}
    made = matcher(continuations("think", TOOLS, response_format=format))
    for token in answer(tokenizer, message):
        mask = made.compute_bitmask()
        assert mask[token // 8] >> token % 8 & 1
        assert made.consume_token(token)
    assert made.is_stopped()


kinds = {
    "string": st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers(), max_size=3),
    "object": st.dictionaries(st.text("ab", max_size=2), st.booleans(), max_size=2),
}


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text('ab"&<é', max_size=3), st.sampled_from(sorted(kinds)), min_size=1, max_size=6), st.data()
)
def test_any_schema_and_any_order_of_its_arguments(compiler, shape: dict[str, str], data: st.DataObject):
    required = data.draw(st.lists(st.sampled_from(sorted(shape)), unique=True))
    parameters = {"properties": {key: {"type": kind} for key, kind in shape.items()}, "required": required}
    grammar = continuations("think", [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    given = data.draw(
        st.permutations([*required, *(key for key in shape if key not in required and data.draw(st.booleans()))])
    )
    arguments = {key: data.draw(kinds[shape[key]]) for key in given}
    assert accepts(compiler, grammar, {"tool_calls": [call("f", arguments=arguments)]})
    if required:
        del arguments[required[0]]
        assert not accepts(compiler, grammar, {"tool_calls": [call("f", arguments=arguments)]})
