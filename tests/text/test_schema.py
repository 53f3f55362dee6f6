"""JSON schemas: those that no value begins are found wherever they lie; few lines take few steps, and little text."""

import json
from urllib.parse import quote

import pytest

from rille.text.grammar import continuations
from rille.text.schema import check_ends, variants

LOOPS = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    {"allOf": [{"type": "integer"}, {"$ref": "#"}]},
    {"type": "object", "properties": {"a": {"oneOf": [{"$ref": "#/properties/a"}]}}, "required": ["a"]},
    {"type": "array", "prefixItems": [{"$ref": "#/prefixItems/0"}]},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/anyOf/1/items"}}]},
]
ENDS = [
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
    {"$defs": {"n": {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"$ref": {"type": "string"}, "a": {"enum": [{"$ref": "#"}]}}},
    {"type": "string", "default": {"$ref": "#/nowhere"}},
]


@pytest.mark.parametrize("schema", LOOPS, ids=json.dumps)
def test_schemas_that_no_value_begins(schema):
    """A grammar of them would let nothing through, and a reply would be empty or cut, as if that were the answer."""
    for form in ({"type": "json_schema", "json_schema": {"schema": schema}}, None):
        tools = (
            []
            if form
            else [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
        )
        moved = json.loads(json.dumps(tools).replace('"#', '"#/properties/x'))
        with pytest.raises(ValueError, match="refers to itself before any value begins"):
            continuations("think", moved, response_format=form)


@pytest.mark.parametrize("schema", ENDS, ids=json.dumps)
def test_schemas_that_come_back_to_themselves_in_values(schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert "%json" in continuations("think", response_format=form).lark


def chained(length: int, width: int, key: str) -> dict:
    """Definitions each of which names the one before several times: a few lines, and width ** length ways through."""
    defs: dict = {"d0": {"type": "object", "properties": {"a": {"type": "string"}}}}
    for number in range(1, length + 1):
        defs[f"d{number}"] = {key: [{"$ref": f"#/$defs/d{number - 1}"}] * width}
    return {"$ref": f"#/$defs/d{length}", "$defs": defs}


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_what_takes_few_lines_takes_few_steps(key):
    """To see that values begin, however many ways lead there; and ways by the million are no grammar."""
    check_ends(chained(500, 3, key), "here")
    endless = chained(500, 3, key)
    endless["$defs"]["d0"] = {"$ref": "#"}
    with pytest.raises(ValueError, match="here: a part of the schema refers to itself"):
        check_ends(endless, "here")
    wide, narrow = chained(7, 30, key), chained(6, 2, key)
    with pytest.raises(ValueError, match="open into more than 1,000 parts"):
        variants(wide, wide)
    assert [variant.type for variant in variants(narrow, narrow)] == ["object"]


def test_parts_that_begin_one_by_one_are_not_looked_at_again_for_each():
    """The steps that this takes grow as the parts do, not as their square."""
    count = 5000
    defs: dict = {"d0": {"type": "string"}, **{f"d{i}": {"$ref": f"#/$defs/d{i - 1}"} for i in range(1, count)}}
    parts = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    for key in ("allOf", "anyOf"):
        deep = {"properties": {"a": {"items": {"allOf": [{key: parts}, *parts, {key: parts[::-1]}]}}}}
        check_ends({"$defs": defs, **deep}, "here")
        with pytest.raises(ValueError, match="refers to itself"):
            check_ends({"$defs": {**defs, "d0": {"$ref": "#/$defs/d9"}}, **deep}, "here")


def test_a_list_of_values_holds_what_the_type_beside_it_admits():
    values = [1, 2.0, 2.5, "1", True, None]
    for kind, held in (("integer", [1, 2.0]), ("number", [1, 2.0, 2.5]), (["integer", "null"], [1, 2.0, None])):
        [*found] = variants({"type": kind, "enum": values}, {})
        assert [value for variant in found for value in variant.schema["enum"]] == held


def test_references_bring_nothing_else():
    """Each part once, however it is spelt. Values that look like references stay; names that look like keywords do."""
    named = {"default": {"$ref": "#/parts/0"}, "$ref": {"$ref": "#/parts/00"}}
    odd = {"const": {"$ref": "#/none"}, "properties": named}
    root = {"parts": [{"type": "string"}, {"type": "null"}], "$defs": {"big": {"enum": ["x" * 1000]}}}
    (found,) = variants({"type": "object", "items": odd}, root)
    part = {"$ref": "#/$defs/part0"}
    assert found.schema["$defs"] == {"part0": {"type": "string"}}
    assert found.schema["items"] == {**odd, "properties": {"default": part, "$ref": part}}


@pytest.mark.parametrize("name", ["List<string>", "a b", "a/b~c", "50%", "%41", "é"])
def test_references_may_be_written_as_urls_are(name):
    """Some makers of schemas escape what is no letter, others do not."""
    parts = {name: {"enum": [1]}, "A": {"enum": [2]}}
    pointed = name.replace("~", "~0").replace("/", "~1")
    for reference in {pointed, quote(pointed)}:
        [found] = variants({"$ref": f"#/$defs/{reference}"}, {"$defs": parts})
        assert found.schema == {"enum": [1]}


def test_an_anchor_is_not_taken_for_the_whole():
    root = {"properties": {"x": {"$ref": "#name"}}, "$defs": {"a": {"$anchor": "name", "type": "string"}}}
    with pytest.raises(ValueError, match="'#name' names an anchor"):
        variants(root["properties"]["x"], root)


def test_a_grammar_grows_as_its_schemas_do(monkeypatch):
    """Where each argument refers to a part of its own, or is a text, which needs none; else there is a limit."""
    parts: dict = {f"d{i}": {"type": "object", "properties": {"text": {"type": "string"}}} for i in range(300)}
    parts["large"] = {"type": "object", "properties": {f"x{i}": {} for i in range(5000)}}
    given: dict = {f"p{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i}"}} for i in range(300)}
    given |= {f"t{i}": {"type": "string", "not": {"$ref": "#/$defs/large"}} for i in range(300)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": given, "$defs": parts}}}
    made = continuations("response", [tool])
    assert len(made.lark) < 5 * len(json.dumps(tool)) and "x4999" not in made.lark
    assert "f.t7: not {'$ref': '#/$defs/large'}" in made.loose
    monkeypatch.setattr("rille.text.grammar._MAX_TEXT", 10_000)
    with pytest.raises(ValueError, match="a grammar of more than 10,000 characters"):
        continuations("response", [tool])
