"""The HTTP face itself: who is let in, what is refused and how, clients that go away, time limits, faults, metrics."""

import http.client
import json
import re
import socket

import anthropic
import openai
import pytest

from rille.serve.api import Limits
from rille.serve.schema import EngineStats, Histogram, QueueFull, TooLarge, Unavailable
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import MAX_LENGTH, refused, serving, until
from tests.serve.test_api_chat import FORMAT, TOOL, USER

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(tokenizer) as served:
        yield served


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


def test_a_body_of_ten_thousand_brackets(server):
    status, answer, _ = server.post(CHAT, b"[" * 10_000)
    assert status == 400 and answer["error"]["message"]


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
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "str, list[str], list[int], list[list[int]]"),
        (CHAT, {"messages": [USER], "stop": 5}, "stop", "str, list[str]"),
        (CHAT, {"messages": [USER], "tool_choice": [1]}, "tool_choice", "str, dict[str,any]"),
        ("/v1/responses", {"input": 5}, "input", "str, list[any]"),
    ):
        error = server.post(path, body)[1]["error"]
        assert error["param"] == name and error["message"] == f"{name}: this is none of {forms}"


def test_the_parameter_is_named(server):
    for body, param in (({"temperature": 200}, "temperature"), ({"tools": [tool("1")]}, "tools"), ({"x": 1}, "x")):
        assert server.post(CHAT, {"messages": [USER], **body})[1]["error"]["param"] == param


# --- statuses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "seconds"),
    [
        (TooLarge("9,000 tokens, and the memory holds 640"), 413, "request_too_large", None),
        (QueueFull("100 wait", retry_after_s=2.2), 429, "rate_limit_error", "3"),
        (QueueFull("100 wait"), 429, "rate_limit_error", "1"),
        (Unavailable("shutting down"), 503, "overloaded_error", "1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_e8_b12_what_the_engine_refuses(server, error, status, kind, seconds, stream):
    bodies = {CHAT: {}, "/v1/completions": {"prompt": "a", "messages": None}}
    for path, more in bodies.items():
        server.engine.scripts.append(refused(error))
        body = {"messages": [USER], "stream": stream, **more}
        got, answer, headers = server.post(path, {key: value for key, value in body.items() if value is not None})
        assert (got, answer["error"]["type"], headers.get("retry-after")) == (status, kind, seconds)
        assert str(error) in answer["error"]["message"]


def test_clients_understand(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    server.engine.scripts.append(refused(QueueFull("busy")))
    with pytest.raises(openai.RateLimitError, match="busy"):
        client.chat.completions.create(model="tiny", messages=[USER])
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=[USER])
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    server.engine.scripts.append(refused(QueueFull("busy")))
    with pytest.raises(anthropic.RateLimitError, match="busy"):
        other.messages.create(model="tiny", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        other.messages.create(model="tiny", max_tokens=0, messages=[USER])


def test_b12_too_long_is_refused_before_anything_is_computed(server):
    before = len(server.engine.requests)
    for body in ({"max_tokens": MAX_LENGTH}, {"messages": [{"role": "user", "content": "word " * 2 * MAX_LENGTH}]}):
        status, answer, _ = server.post(CHAT, {"messages": [USER], **body})
        assert status == 413 and answer["error"]["code"] == "context_length_exceeded"
        assert f"{MAX_LENGTH:,}" in answer["error"]["message"]
    assert len(server.engine.requests) == before


def test_unknown_paths_and_methods(server):
    assert server.post("/v1/unknown", {})[0] == 404
    status, body, headers = server.get(CHAT)
    assert status == 405 and json.loads(body)["error"]["message"] and headers["allow"] == "POST"
    status, body, _ = server.post("/v1/messages", {})
    assert status == 400 and body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_c6_a_failed_row_fails_its_request_alone(server, tokenizer):
    ids = reply_ids(tokenizer, content="x")
    server.say(ids, reason="error", error="logits are not finite")
    status, body, _ = server.post(CHAT, {"messages": [USER]})
    assert status == 500 and "logits are not finite" in body["error"]["message"]
    server.say(ids, reason="error", error="logits are not finite")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="logits are not finite"):
        list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))
    server.say(ids)
    assert server.post(CHAT, {"messages": [USER]})[0] == 200


def test_ids_that_the_tokenizer_does_not_have(server, tokenizer):
    """A model may have more words than its tokenizer: that request fails, in words."""
    server.say([tokenizer.vocab_size + 1], text=False)
    status, body, _ = server.post(CHAT, {"messages": [USER]})
    assert status == 500 and f"token id {tokenizer.vocab_size + 1}" in body["error"]["message"]


def test_no_traceback_reaches_a_client(server):
    """A fault of the server's own: no script is left, so that the engine's `submit` raises IndexError."""
    for body in ({}, {"stream": True}):
        status, answer, _ = server.post(CHAT, {"messages": [USER], **body})
        assert status == 500 and "log" in answer["error"]["message"]
        assert not re.search("Traceback|IndexError|File|pop", json.dumps(answer))


# --- keys, sizes, times -----------------------------------------------------------------------------------------------


def test_keys_and_sizes(tokenizer):
    with serving(tokenizer, Limits(keys=("secret", "other"), max_body=1000)) as server:
        body = {"messages": [USER]}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"x_api_key": ""},
            {"Authorization": "Bearer sécret"},
        ):
            headers = {key: value.encode().decode("latin-1") for key, value in headers.items()}
            status, answer, _ = server.post(CHAT, body, **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        for headers in (
            {"Authorization": "Bearer secret"},
            {"Authorization": "bearer  secret"},
            {"x_api_key": "other"},
            {"x_api_key": "unset", "Authorization": "Bearer other"},
        ):
            server.say(reply_ids(tokenizer, content="x"))
            assert server.post(CHAT, body, **headers)[0] == 200
        assert server.get("/v1/models")[0] == server.get("/figures")[0] == 401
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200
        big = {"messages": [{"role": "user", "content": "x" * 1000}]}
        status, answer, _ = server.post(CHAT, big, Authorization="Bearer secret")
        assert status == 413 and "1,000" in answer["error"]["message"]


def test_a_body_without_a_length_is_bounded_too(tokenizer):
    with serving(tokenizer, Limits(max_body=1000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", CHAT, iter([b"x" * 600, b"x" * 600]), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_time_limit(tokenizer):
    with serving(tokenizer, timeout_s=0.05) as server:
        ids = reply_ids(tokenizer, content="x")
        server.say(ids[:2], hold=True)
        status, body, _ = server.post(CHAT, {"messages": [USER]})
        assert status == 408 and body["error"]["type"] == "timeout_error" and "0.05 s" in body["error"]["message"]
        server.say(ids[:2], hold=True)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match=r"longer than the 0\.05 s"):
            list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))
        assert server.request.deadline_s == 0.05


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_client_that_goes_away_ends_its_request(tokenizer, path, stream):
    body = {
        CHAT: {"messages": [USER]},
        "/v1/completions": {"prompt": ["a", "b"]},
        "/v1/messages": {"model": "tiny", "messages": [USER], "max_tokens": 9},
        "/v1/responses": {"input": "hi"},
    }[path]
    with serving(tokenizer) as server:
        ids = reply_ids(tokenizer, content="x")
        for _ in range(2):
            server.say(ids[:1], hold=True)
        host, port = server.url.removeprefix("http://").split(":")
        text = json.dumps({**body, "stream": stream}).encode()
        line = socket.create_connection((host, int(port)))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        line.sendall(head.encode() + text)
        count = 2 if path == "/v1/completions" else 1
        until(lambda: len(server.engine.requests) == count)
        if stream:
            assert line.recv(100).startswith(b"HTTP/1.1 200")
        assert not server.engine.aborted
        line.close()
        until(lambda: set(server.engine.aborted) == {f"request-{i + 1}" for i in range(count)})


def test_a_failed_prompt_takes_the_others_with_it(server, tokenizer):
    server.say([5, 6], hold=True)
    server.engine.scripts.append(refused(QueueFull("full")))
    before = len(server.engine.aborted)
    assert server.post("/v1/completions", {"prompt": ["a", "b"]})[0] == 429
    until(lambda: len(server.engine.aborted) > before)


def test_requests_are_named(server):
    assert server.get("/health", x_request_id="mine")[2]["x-request-id"] == "mine"
    assert server.get("/health")[2]["x-request-id"].startswith("req_")


# --- what operators read ----------------------------------------------------------------------------------------------


def test_models(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").max_model_len == MAX_LENGTH  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")
    other = anthropic.Anthropic(base_url=server.url, api_key="none")
    assert [(model.id, model.created_at.year) for model in other.models.list()] == [("tiny", 2023), ("other", 2023)]


def test_health(server):
    assert server.get("/health")[0] == 200
    for error, status in ((Unavailable("stopped"), 503), (QueueFull("busy"), 200)):
        server.engine.down = error
        assert server.get("/health")[0] == status
    server.engine.down = None


def test_b13_metrics(server, tokenizer):
    server.engine.figures = EngineStats(
        running=3,
        pages_total=10,
        pages_used=4,
        cache_queries=100,
        cache_hits=60,
        latent_hits=80,
        misses={"cold": 30, "no_checkpoint": 10},
        finished={"stop": 7},
        accepted_at=(5, 2),
        step_tokens=Histogram((1.0, 2.0), (4, 2, 1), 21.0),
        page_tokens=128,
    )
    before = value(server, "vllm:e2e_request_latency_seconds_count")
    server.say(reply_ids(tokenizer, content="x"))
    server.post(CHAT, {"messages": [USER]})
    assert [value(server, "vllm:iteration_tokens_total_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [4, 6, 7]
    assert value(server, "vllm:iteration_tokens_total_sum") == 21
    assert value(server, "vllm:cache_config_info", block_size="128", num_gpu_blocks="10") == 1
    assert value(server, "vllm:num_requests_running") == 3
    assert value(server, "vllm:kv_cache_usage_perc") == 0.4
    assert value(server, "vllm:prefix_cache_queries_total") == 100
    assert value(server, "vllm:prefix_cache_hits_total") == 60 < value(server, "rille:prefix_cache_latent_hits_total")
    for reason, count in (("cold", 30), ("no_checkpoint", 10), ("evicted", 0), ("below_unit", 0), ("draft", 0)):
        assert value(server, "rille:prefix_cache_miss_tokens_total", reason=reason) == count
    assert value(server, "vllm:request_success_total", finished_reason="stop") == 7
    assert value(server, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2
    assert value(server, "vllm:e2e_request_latency_seconds_count") == before + 1
    assert value(server, "vllm:time_to_first_token_seconds_count") >= 1
    assert value(server, "vllm:inter_token_latency_seconds_count") >= 1
    assert value(server, "vllm:request_time_per_output_token_seconds_count") >= 1
    assert value(server, "vllm:request_generation_tokens_sum") >= len(reply_ids(tokenizer, content="x"))


def test_a_stop_string_is_no_abort_in_the_metrics(tokenizer):
    """A chat ends at a stop string by an abort of the engine's request; the client was answered all the same."""
    with serving(tokenizer) as server:
        server.say(reply_ids(tokenizer, content="one STOP two three four five six"), gap_s=0.01)
        status, body, _ = server.post(CHAT, {"messages": [USER], "stop": "STOP"})
        assert status == 200 and body["choices"][0]["finish_reason"] == "stop"
        server.engine.figures = EngineStats(finished={"abort": 1})
        assert value(server, "vllm:request_success_total", finished_reason="stop") == 1
        assert value(server, "vllm:request_success_total", finished_reason="abort") == 0
        assert value(server, "vllm:e2e_request_latency_seconds_count") == 1
        assert value(server, "vllm:request_generation_tokens_sum") == body["usage"]["completion_tokens"]


def value(server, name, **labels):
    for line in server.get("/metrics")[1].decode().splitlines():
        if line.startswith(name + "{") and all(f'{key}="{label}"' in line for key, label in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


def test_figures(server):
    assert {"running", "pages_total", "misses", "about"} <= set(json.loads(server.get("/figures")[1]))


def test_formats_are_checked_where_they_are_used(server, tokenizer):
    server.say(reply_ids(tokenizer, reasoning_content="", content='{"ok":false}'))
    status, body, _ = server.post(CHAT, {"messages": [USER], "response_format": FORMAT})
    assert status == 200 and body["choices"][0]["message"]["content"] == '{"ok":false}'
