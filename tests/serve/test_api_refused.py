"""Bodies that cannot be: refused in one line that names the parameter, before anything runs; and those that can, though
they look odd."""

import json

import pytest

from rille.serve import bodies
from rille.serve.bodies import read_json
from rille.serve.errors import from_value_error
from tests.serve.scripted import reply_ids
from tests.serve.test_api_chat import FORMAT, TOOL, USER

CHAT = "/v1/chat/completions"


def tool(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


def late(**message):
    return {"messages": [USER, {"role": "system", **message}]}


RESULT = {"role": "tool", "content": "42"}
WRONG = {
    # D10: what Moonshot's verifier expects to be refused
    "dynamic tools with content": late(content="hi", tools=[TOOL]),
    "dynamic tools of a user": {"messages": [{"role": "user", "content": "", "tools": [TOOL]}]},
    "dynamic tools that are no list": late(tools={"a": 1}),
    "dynamic tool that is null": late(tools=[None]),
    "tool without a type": {"tools": [{"function": {"name": "a"}}]},
    "tool without a function": {"tools": [{"type": "function"}]},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "tool of an unknown type": {"tools": [{"type": "magic", "function": {"name": "a"}}]},
    "tools that are no list": {"tools": "double"},
    "name with a digit first": {"tools": [tool("1a")]},
    "name with special characters": {"tools": [tool("a b!")]},
    "name with a line feed behind": {"tools": [tool("a\n")]},
    "empty name": {"tools": [tool("")]},
    "name of 257 characters": {"tools": [tool("a" * 257)]},
    "dynamic name of 257 characters": late(tools=[tool("a" * 257)]),
    "a tool twice": {"tools": [TOOL, TOOL]},
    "a tool globally and dynamically": {"tools": [TOOL], **late(tools=[TOOL])},
    "result without an id": {"messages": [USER, RESULT], "tools": [TOOL]},
    "result of no call": {"messages": [USER, {**RESULT, "tool_call_id": "x"}]},
    "required without tools": {"tool_choice": "required"},
    "unknown tool_choice": {"tool_choice": "perhaps", "tools": [TOOL]},
    "choice of an undeclared tool": {"tool_choice": tool("other"), "tools": [TOOL]},
    "format without a name": {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    "format without a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    "schema that is no object": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}}
    },
    "strict that is no boolean": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}
    },
    "unknown format": {"response_format": {"type": "yaml"}},
    "a schema beside json_object": {"response_format": {"type": "json_object", "schema": {"type": "integer"}}},
    "a schema beside text": {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
    "an unknown key of a form": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "regex": "a"}}
    },
    "a schema that is only itself": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    },
    # the rest
    "unknown effort": {"reasoning_effort": "immense"},
    "unknown kind of thinking": {"thinking": {"type": "sometimes"}},
    "unknown parameter": {"temprature": 1},
    "temperature as a text": {"temperature": "1"},
    "temperature below 0": {"temperature": -1},
    "top_p of 0": {"top_p": 0},
    "n of 0": {"n": 0},
    "n of a thousand": {"n": 1000},
    "no tokens": {"max_tokens": 0},
    "more tokens than a number holds": {"seed": 2**70},
    "a bias on no id": {"logit_bias": {"a": 1}},
    "a bias without bounds": {"logit_bias": {"5": 1e300}},
    "a penalty next to 0": {"repetition_penalty": 1e-40},
    "min_tokens with a form": {"min_tokens": 3, "response_format": FORMAT},
    "min_tokens with tools": {"min_tokens": 3, "tools": [TOOL]},
    "top_logprobs without logprobs": {"top_logprobs": 3},
    "too many logprobs": {"logprobs": True, "top_logprobs": 21},
    "an empty stop string": {"stop": [""]},
    "stop strings without end": {"stop": ["x"] * 17},
    "stream_options without a stream": {"stream_options": {"include_usage": True}},
    "no messages": {"messages": []},
    "unknown role": {"messages": [{"role": "oracle", "content": "?"}]},
    "message that is a text": {"messages": ["hi"]},
    "content that is a number": {"messages": [{"role": "user", "content": 3}]},
    "half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "a call in the older form": {
        "messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "a", "arguments": "{}"}}]
    },
    "a refusal": {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}, USER]},
    "partial that is no boolean": {"messages": [USER, {"role": "assistant", "content": "a", "partial": "false"}]},
    "early partial message": {"messages": [{"role": "assistant", "content": "a", "partial": True}, USER]},
    "picture that is none": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}]}
        ]
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_d10_refused_in_one_line(server, name):
    before = len(server.engine.requests)
    status, body, _ = server.post(CHAT, {"model": "tiny", "messages": [USER], **WRONG[name]})
    error = body["error"]
    assert status == 400 and error["type"] == "invalid_request_error", body
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and len(server.engine.requests) == before


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}', b"["],
)
def test_bodies_that_are_no_request(server, body):
    status, answer, _ = server.post(CHAT, body)
    assert status == 400 and answer["error"]["message"]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (b'"metadata": {"a": NaN}', "NaN is no number of JSON"),
        (b'"metadata": {"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'"metadata": {"a": [1e999]}', "the number 1e999 is out of range"),
        (b'"user": "a", "user": "b"', "it gives 'user' twice"),
        (b'"metadata": {"a": {"b": 1, "b": 1}}', "it gives 'b' twice"),
        (b'"user": "' + "é".encode("latin-1") + b'"', "it is not UTF-8"),
        (b'"metadata": {"a": ' + b"9" * 5000 + b"}", "it has a number of thousands of digits"),
        (b'"metadata": {"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "it nests too deep"),
        (b'"user": "a"} {', "Extra data"),
        (b'"user": "a\0"', "Invalid control character at"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_what_is_no_json_is_told_in_words(server, path, odd, told):
    """Whatever a reply would repeat of it, and wherever one of two values would be lost."""
    status, answer, _ = server.post(path, b'{"model": "tiny", "stream": true, ' + odd + b"}")
    assert status == 400 and answer["error"]["message"] == f"the body cannot be read as JSON: {told}"


def test_a_name_that_is_no_text_is_told_as_such(server):
    status, answer, _ = server.post(CHAT, b'{"messages": [], "\\ud800": 1}')
    assert status == 400 and "lone surrogate" in answer["error"]["message"]


def test_a_body_of_more_values_than_memory_is_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(bodies, "MOST_VALUES", 1000)
    text = '"' + "x" * 5000 + '"'
    assert read_json(f"[{text}, [{'1,' * 900}1]]".encode())[0] == "x" * 5000
    for many in ("[],", "{},", "1,"):
        with pytest.raises(json.JSONDecodeError, match="more than 1,000 values"):
            read_json(f"[{text}, {many * 1100}1]".encode())


def test_the_name_that_is_given_twice_is_found_at_once():
    """Among as many as a body of a megabyte has, whatever the place: the server waits for this."""
    names = [f"n{number}" for number in range(100_000)]
    for twice in (names[0], names[-1]):
        text = ",".join(f'"{name}":1' for name in [*names, twice])
        with pytest.raises(json.JSONDecodeError, match=f"it gives '{twice}' twice"):
            read_json(f"{{{text}}}".encode())


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("depth", [20, 150, 250, 450])
def test_a_schema_of_any_depth_is_taken_or_refused(server, tokenizer, depth):
    """Deep enough for what walks through it to come to its limit, and less."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(depth)}}
    for path, body in (
        (CHAT, {"messages": [USER], "tools": [tool("a", parameters=nested(depth))]}),
        (CHAT, {"messages": [USER], "response_format": form}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "a", "parameters": nested(depth)}]}),
        ("/v1/responses", {"input": "a", "metadata": nested(depth)}),
        ("/tokenize", {"messages": [USER], "tools": [tool("a", parameters=nested(depth))]}),
    ):
        server.engine.scripts.clear()
        server.say(reply_ids(tokenizer, content="{}"))
        status, answer, _ = server.post(path, body)
        assert status == 200 or (status == 400 and answer["error"]["message"]), (path, answer)
        assert status == 200 or depth > 20, answer


def test_tool_choice_without_tools_is_fine(server, tokenizer):
    for choice in ("none", "auto"):
        server.say(reply_ids(tokenizer, content="ok"))
        status, _, _ = server.post(CHAT, {"messages": [USER], "tool_choice": choice})
        assert status == 200


def test_null_is_as_if_it_were_not_there(server, tokenizer):
    """Clients send it for what nobody set, under names that are unknown here too."""
    server.say(reply_ids(tokenizer, content="ok"))
    nulls = {"functions": None, "audio": None, "temperature": None, "stop": None, "tools": None, "thinking": None}
    assert server.post(CHAT, {"messages": [USER], **nulls})[0] == 200
    assert server.request.params.temperature == 1
    assert server.post(CHAT, {"messages": None})[0] == 400
    assert server.post(CHAT, {"messages": [USER], "functions": []})[1]["error"]["param"] == "functions"


def test_what_clients_send_back_with_a_message_is_taken(server, tokenizer):
    """Every field that OpenAI's client gives a message, as it stands when nobody has filled it."""
    server.say(reply_ids(tokenizer, content="ok"))
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r", "partial": False, **empty}
    assert server.post(CHAT, {"messages": [USER, answer, USER]})[0] == 200


def test_both_limits_hold(server, tokenizer):
    for limits in ({"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 3}):
        server.say(reply_ids(tokenizer, content="one two three"))
        assert server.post(CHAT, {"messages": [USER], **limits})[1]["usage"]["completion_tokens"] == 3


def test_forms_that_a_value_may_have_are_listed(server):
    """Not the fault of the first one alone, which may not be meant."""
    for path, body, name, forms in (
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "str, list[int], list[list[int]], list[str]"),
        (CHAT, {"messages": [USER], "stop": 5}, "stop", "str, list[str]"),
        (CHAT, {"messages": [USER], "tool_choice": [1]}, "tool_choice", "str, dict[str,any]"),
        ("/v1/responses", {"input": 5}, "input", "str, list[any]"),
    ):
        error = server.post(path, body)[1]["error"]
        assert error["param"] == name and error["message"] == f"{name}: this is none of {forms}"


NAMED = {
    CHAT: (
        ({"temperature": 200}, "temperature"),
        ({"tools": [tool("1")]}, "tools"),
        ({"x": 1}, "x"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ),
    "/v1/completions": (
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ),
    "/v1/messages": (
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
    ),
    "/v1/responses": (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"include": ["reasoning"]}, "include"),
    ),
}


@pytest.mark.parametrize(("path", "body", "name"), [(path, *one) for path, every in NAMED.items() for one in every])
def test_the_parameter_is_named(server, path, body, name):
    """As the body calls it, whatever its name is further down."""
    least = {
        CHAT: {"messages": [USER]},
        "/v1/completions": {},
        "/v1/messages": {"model": "tiny", "messages": [USER], "max_tokens": 5},
        "/v1/responses": {"input": "a"},
    }[path]
    status, answer, _ = server.post(path, {**least, **body})
    assert status == 400 and answer["error"]["message"].startswith(name)
    assert answer["error"].get("param", name) == name


def test_what_the_engine_calls_otherwise_is_told_by_its_name_in_bodies():
    error = from_value_error(ValueError("stop_ids has ids from 440 to 440; the vocabulary has 0..439"))
    assert error.param == "stop_token_ids" and str(error).startswith("stop_token_ids has ids from 440")


CALLS = [{"type": "tool_use", "id": "a", "name": "", "input": {}}]
NO_ARGUMENTS = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/messages", {"messages": [USER, {"role": "assistant", "content": CALLS}]}, "messages[1].tool_calls[0]"),
        ("/v1/messages", {"messages": [USER, USER, {"role": "tool"}]}, "messages[2] has the role"),
        ("/v1/responses", {"input": [USER, NO_ARGUMENTS]}, "input[1].tool_calls[0] (f): arguments"),
        ("/v1/responses", {"input": [USER, {"role": "assistant", "content": "a"}, USER, {"role": "tool"}]}, "input[3]"),
        ("/v1/responses", {"input": [USER, {"role": "x", "content": "a"}]}, "input[1] has the role"),
    ],
)
def test_a_place_is_told_as_the_client_knows_it(server, path, body, place):
    """What stands before the messages, or became several of them, moves no number."""
    head = {"model": "tiny", "max_tokens": 5, "system": "s"} if path == "/v1/messages" else {"instructions": "s"}
    for tools in ({}, {"tools": []}):
        status, answer, _ = server.post(path, {**head, **body, **tools})
        assert status == 400 and answer["error"]["message"].startswith(place), answer


LOOP = {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("path", "body", "told", "name"),
    [
        ("/v1/responses", {"input": []}, "input must be a list with at least one message", "input"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "z"}}}, "text.format 'z' is not", "text.format"),
        ("/v1/responses", {"input": "x", "text": {"format": LOOP}}, "text.format: a part of the schema", "text.format"),
        ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation: this server keeps no", "conversation"),
        (
            "/v1/responses",
            {"input": "x", "previous_response_id": "resp_1"},
            "previous_response_id: this server keeps no conversations; send all of the input each time",
            "previous_response_id",
        ),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice 'any' or a tool needs tools", None),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
            "output_config.format: a part of the schema refers to itself",
            None,
        ),
    ],
)
def test_a_fault_is_told_in_the_words_of_its_api(server, path, body, told, name):
    body = body if path == "/v1/responses" else {"model": "tiny", "max_tokens": 5, "messages": [USER], **body}
    status, answer, _ = server.post(path, body)
    assert status == 400 and told in answer["error"]["message"] and answer["error"].get("param") == name
