"""Messages, tools and options that cannot be rendered: one line that says where and what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.text.chat import render
from tests.text.conftest import CLOCK, USER, call


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], r"messages\[0\] must be an object, not str"),
        ([USER, {"role": "developer", "content": "x"}], r"messages\[1\] has the role 'developer'; roles are"),
        ([{"content": "x"}], "has the role None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text or a list of parts, not int"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be of type 'text'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] must be of type 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must be of type 'text'"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\].name must be a text"),
        ([{"role": "user", "tool_calls": [call("f")]}], "must be a list, in an assistant message"),
        ([{"role": "assistant", "reasoning": ["x"]}], r"reasoning must be a text"),
        ([{"role": "assistant", "tool_calls": {"f": 1}}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [None]}], r"tool_calls\[0\] has no function with a name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], "has no function with a name"),
        ([{"role": "assistant", "tool_calls": [call("f", arguments="[1]")]}], r"\(f\): arguments must be an object"),
        ([{"role": "assistant", "tool_calls": [call("f", arguments=[1])]}], "must be an object .*, not list"),
        ([{"role": "assistant", "tool_calls": [call("f", arguments={1: 2})]}], "with named values"),
        ([{"role": "assistant", "tool_calls": [call("f", arguments={"a": {1, 2}})]}], "'a' cannot be written as JSON"),
        ([{"role": "assistant", "tool_calls": [call("f", arguments={"a": [float("nan")]})]}], "cannot be written"),
        ([{"role": "tool", "content": "x"}], "tool result 1 .* belongs to no call and names no tool"),
        ([{"role": "user", "tools": [CLOCK]}], "declares tools, which only a system message without content can"),
        ([{"role": "system", "content": "x", "tools": [CLOCK]}], "without content"),
        ([{"role": "system", "tools": {"a": 1}}], r"messages\[0\].tools must be a list of tools, not dict"),
    ],
)
def test_messages_that_cannot_be_rendered(messages, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"a": 1}, "tools must be a list of tools, not dict"),
        ([None], r"tools\[0\] must be an object with type 'function'"),
        ([{"function": {"name": "f"}}], r"tools\[0\] must be an object with type 'function'"),
        ([CLOCK, {"type": "function"}], r"tools\[1\] has no function with a name"),
        ([{"type": "function", "function": {"name": ""}}], "has no function with a name"),
        ([CLOCK, CLOCK], "'clock' is declared twice"),
        ([{"type": "function", "function": {"name": "f", "parameters": {1}}}], "cannot be written as JSON"),
    ],
)
def test_tools_that_cannot_be_declared(tools, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        render([USER], tools)
    assert "\n" not in str(caught.value)


def test_dynamic_tools_have_names_of_their_own():
    with pytest.raises(ValueError, match="'clock' is declared twice"):
        render([USER, {"role": "system", "tools": [CLOCK]}], [CLOCK])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xml", "response_format 'xml' is not one of"),
        ({}, "response_format None is not one of"),
        ("json_schema", "needs a schema"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "needs a schema, an object"),
        ({"type": "json_schema", "json_schema": {"schema": {"a": {1}}}}, "cannot be written as JSON"),
    ],
)
def test_response_formats_that_are_none(given, message: str):
    with pytest.raises(ValueError, match=message):
        render([USER], response_format=given)


KEYS = "role content name tool tools tool_calls tool_call_id id function arguments reasoning type text partial".split()
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(["", "x", "system", "user", "assistant", "tool", "text", "image", "function", "{", "{}", "[1]"]),
)
junk = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)
almost = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])}, optional=dict.fromkeys(KEYS[1:], junk)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(almost, junk), max_size=3), junk, junk, junk)
def test_anything_is_rendered_or_refused_in_one_line(messages: list, tools, choice, response_format):
    for options in (
        {},
        {"tools": tools},
        {"tool_choice": choice},
        {"response_format": response_format},
        {"effort": choice},
    ):
        try:
            assert render(messages, **options).text
        except ValueError as error:
            assert "\n" not in str(error)
