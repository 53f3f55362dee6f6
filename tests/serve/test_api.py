"""The HTTP face itself: who is let in, statuses, clients that go away, time limits, faults, metrics."""

import gzip
import http.client
import json
import re
import socket
from dataclasses import replace

import anthropic
import openai
import pytest

from rille.serve.api import Limits
from rille.serve.schema import EngineStats, Finished, FinishReason, Histogram, QueueFull, TooLarge, Unavailable, Usage
from tests.serve.scripted import reply_ids
from tests.serve.served import MAX_LENGTH, refused, serving, until
from tests.serve.test_api_chat import FORMAT, USER

CHAT = "/v1/chat/completions"


# --- statuses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "seconds"),
    [
        (TooLarge("9,000 tokens, and the memory holds 640"), 400, "invalid_request_error", None),
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
    long = {"messages": [{"role": "user", "content": "word " * 2 * MAX_LENGTH}]}
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "odd"}}}}}
    for body in ({"max_tokens": MAX_LENGTH}, long, {**long, "tools": [odd]}):  # no grammar is made either
        status, answer, _ = server.post(CHAT, {"messages": [USER], **body})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert f"{MAX_LENGTH:,}" in answer["error"]["message"]
    for path, body in ((CHAT, {}), ("/v1/messages", {"model": "tiny", "max_tokens": 5})):
        status, answer, _ = server.post(path, {"messages": [USER] * (MAX_LENGTH + 1), **body})
        assert status == 400 and "4,001 messages have more tokens than" in answer["error"]["message"]
    assert len(server.engine.requests) == before


def test_unknown_paths_and_methods(server):
    assert server.post("/v1/unknown", {})[0] == 404
    status, body, headers = server.get(CHAT)
    assert status == 405 and json.loads(body)["error"]["message"] and headers["allow"] == "POST"
    status, body, _ = server.post("/v1/messages", {})
    assert status == 400 and body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_whoever_asks_for_heads_alone_gets_them(server):
    """As a balancer does, to see who is there."""
    for path, status in (("/health", 200), ("/v1/models", 200), ("/", 200), ("/v1/unknown", 404), (CHAT, 405)):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        connection.request("HEAD", path)
        response = connection.getresponse()
        assert response.status == status and response.read() == b"" and response.getheader("x-request-id")
        connection.request("GET", "/health")  # nothing of a body is left on the line
        assert connection.getresponse().status == 200
        connection.close()


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


def test_no_traceback_reaches_a_client(server):
    """A fault of the server's own: no script is left, so that the engine's `submit` raises IndexError."""
    for body in ({}, {"stream": True}):
        status, answer, _ = server.post(CHAT, {"messages": [USER], **body})
        assert status == 500 and "log" in answer["error"]["message"]
        assert not re.search("Traceback|IndexError|File|pop", json.dumps(answer))


# --- keys, sizes, times -----------------------------------------------------------------------------------------------


def test_keys_and_sizes(tokenizer):
    with serving(tokenizer, Limits(keys=("secret", "other", "schlüssel"), max_body=1000)) as server:
        body = {"messages": [USER]}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"x_api_key": ""},
            {"Authorization": "Bearer sécret"},
        ):
            headers = {key: value.encode().decode("latin-1") for key, value in headers.items()}
            status, answer, told = server.post(CHAT, body, **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert told["www-authenticate"] == "Bearer"
        for headers in (
            {"Authorization": "Bearer secret"},
            {"Authorization": "bearer  secret"},
            {"x_api_key": "other"},
            {"x_api_key": "unset", "Authorization": "Bearer other"},
            {"x_api_key": "schlüssel".encode().decode("latin-1")},
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


def test_what_took_too_long_is_not_asked_again(tokenizer):
    """Clients do so after a 408, unless told otherwise."""
    with serving(tokenizer, timeout_s=0.05) as server:
        server.say(reply_ids(tokenizer, content="x")[:2], hold=True)
        with pytest.raises(openai.APIStatusError, match="longer than"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").completions.create(model="tiny", prompt="a")
        server.say(reply_ids(tokenizer, content="x")[:2], hold=True)
        with pytest.raises(anthropic.APIStatusError, match="longer than"):
            anthropic.Anthropic(base_url=server.url, api_key="none").messages.create(
                model="tiny", max_tokens=9, messages=[USER]
            )
        assert len(server.engine.requests) == 2


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


def test_a_fault_names_its_request_too(server, monkeypatch):
    def fail(request):
        raise RuntimeError("a secret")

    monkeypatch.setattr(server.engine, "submit", fail)
    status, body, headers = server.post(CHAT, {"messages": [USER]}, x_request_id="mine")
    assert (status, headers["x-request-id"]) == (500, "mine") and "secret" not in str(body)


def test_a_body_that_is_packed_is_told_as_such(server):
    body = gzip.compress(json.dumps({"messages": [USER]}).encode())
    status, told, _ = server.post(CHAT, body, Content_Encoding="gzip")
    assert status == 415 and "encoded as 'gzip'" in told["error"]["message"]
    server.say([])
    assert server.post(CHAT, {"messages": [USER]}, Content_Encoding="identity")[0] == 200


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


def test_no_count_of_ends_falls(tokenizer):
    """However late the engine tells of a choice that a stop string has ended, and whether or not it does."""
    with serving(tokenizer) as server:
        meters, aborted = server.front.meters, Finished(0, "abort", Usage(1, 0, 1))
        meter, seen = meters.begin(0.0), []

        def look(abort: int, length: int = 0) -> None:
            counts: dict[FinishReason, int] = {"abort": abort, "length": length}
            server.engine.figures = EngineStats(finished=counts)
            found = re.findall(r'success_total{.*reason="(\w+)".*} (\S+)', meters.text().decode())
            ends = {reason: float(count) for reason, count in found}
            seen.append((ends["abort"], ends["stop"], ends["length"]))

        look(abort=5)
        meter.stops()
        look(abort=5)
        look(abort=6)
        meter.ended(aborted, aborted.usage, True)
        look(abort=6)
        meter.stops()
        look(abort=6, length=1)  # it was over before it heard of it
        meter.ended(replace(aborted, reason="length"), aborted.usage, True)
        look(abort=6, length=1)
        meter.stops()
        meter.leaves(1)
        look(abort=7, length=1)
    assert seen == [(5, 0, 0), (5, 0, 0), (5, 0, 0), (5, 1, 0), (5, 1, 1), (5, 1, 1), (6, 1, 1)]


def test_figures(server):
    assert {"running", "pages_total", "misses", "about"} <= set(json.loads(server.get("/figures")[1]))


def test_formats_are_checked_where_they_are_used(server, tokenizer):
    server.say(reply_ids(tokenizer, reasoning_content="", content='{"ok":false}'))
    status, body, _ = server.post(CHAT, {"messages": [USER], "response_format": FORMAT})
    assert status == 200 and body["choices"][0]["message"]["content"] == '{"ok":false}'
