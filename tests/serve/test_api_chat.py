"""`/v1/chat/completions` as OpenAI's own client sees it: content, thinking, calls, formats, usage; streamed and whole.

Names of tests carry the public reports whose kind they hold: A2, A9, ... are rows of a list of such reports.
"""

import json
from itertools import chain

import openai
import pytest

from rille.text.images import ImageConfig
from rille.text.vocabulary import CLOSE, END_OF_MESSAGE, OPEN, SEP
from tests.serve.scripted import reply_ids
from tests.serve.served import Served, serving
from tests.serve.test_chat import CALL

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(autouse=True)
def checking(server):
    server.engine.is_checking = True


def whole(client, **request):
    return client.chat.completions.create(model="tiny", **{"messages": [USER], **request})


def streamed(client, **request):
    """The chunks of a stream, and its choices put together: content, reasoning, calls, finish reasons."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="tiny", **{"messages": [USER], **request}, **options))
    choices: dict = {}
    for choice in chain.from_iterable(chunk.choices for chunk in chunks):
        into = choices.setdefault(choice.index, {"content": "", "reasoning": None, "calls": {}, "reason": None})
        delta = choice.delta
        into["content"] += delta.content or ""
        if (text := getattr(delta, "reasoning_content", None)) is not None:
            into["reasoning"] = (into["reasoning"] or "") + text
        for call in delta.tool_calls or []:
            name, arguments = into["calls"].get(call.index, (None, ""))
            assert (name is None) == (call.function.name is not None), (
                "a name comes whole, in the first delta of a call"
            )
            into["calls"][call.index] = (name or call.function.name, arguments + (call.function.arguments or ""))
        into["reason"] = choice.finish_reason or into["reason"]
    return chunks, choices


def put_together(choice):
    message = choice.message
    calls = {i: (call.function.name, call.function.arguments) for i, call in enumerate(message.tool_calls or [])}
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": calls,
        "reason": choice.finish_reason,
    }


def both(server: Served, client, *choices, script=None, **request):
    """The same reply whole and streamed, which must be equal; returns the whole one."""
    for _ in range(2):
        server.say(*choices, **(script or {}))
    reply = whole(client, **request)
    chunks, streams = streamed(client, **request)
    assert {choice.index: put_together(choice) for choice in reply.choices} == streams
    assert chunks[-1].usage == reply.usage and chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    return reply


def markup(tokenizer, text: str) -> list[int]:
    return tokenizer.encode_with_specials(text)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_content_and_reasoning(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="Hm, é 🙂.", content="Hello\nyou 🙂")
    reply = both(server, client, ids)
    [choice] = reply.choices
    assert choice.message.content == "Hello\nyou 🙂" and choice.message.reasoning_content == "Hm, é 🙂."
    assert (choice.finish_reason, reply.model, reply.object) == ("stop", "tiny", "chat.completion")
    assert reply.usage.completion_tokens == len(ids)
    thought = len(tokenizer.encode("Hm, é 🙂."))
    assert reply.usage.completion_tokens_details.reasoning_tokens == thought < len(ids)


def test_a_stream_has_reasoning_then_content_then_the_reason(server, client, tokenizer):
    server.say(reply_ids(tokenizer, reasoning_content="think a bit", content="say a bit"), gap_s=0.02)
    chunks, _ = streamed(client)
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant"
    thinks = [getattr(d.delta, "reasoning_content", None) for d in deltas]
    kinds = ["reasoning" if t else "content" if d.delta.content else "end" for t, d in zip(thinks, deltas, strict=True)]
    kinds = kinds[1:]
    assert kinds == sorted(kinds, key=["reasoning", "content", "end"].index) and len(set(kinds)) == 3
    assert kinds.count("reasoning") > 1 and kinds.count("content") > 1, "it streams"


def test_a2_tools_without_closed_thinking(server, client, tokenizer):
    call = (
        f'{OPEN}call tool="double" index="1"{SEP}{OPEN}argument key="number" type="number"{SEP}21{CLOSE}argument{SEP}'
    )
    tail = f"{CLOSE}call{SEP}{CLOSE}tools{SEP}{CLOSE}message{SEP}{END_OF_MESSAGE}"
    ids = markup(tokenizer, f"thinking{OPEN}tools{SEP}{call}{tail}")
    server.engine.is_checking = False  # no grammar would let it pass; a model without masks writes it
    [choice] = both(server, client, ids, tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"number": 21}
    assert choice.message.reasoning_content == "thinking"


def test_a9_d1_thinking_is_skipped(server, client, tokenizer):
    ids = markup(tokenizer, f"{OPEN}response{SEP}at once{CLOSE}response{SEP}{CLOSE}message{SEP}{END_OF_MESSAGE}")
    [choice] = both(server, client, ids).choices
    assert choice.message.content == "at once" and choice.message.reasoning_content == ""


def test_a9_the_answer_begins_without_a_tag(server, client, tokenizer):
    """An answer without thinking goes where the prompt opened; the request decides, nothing is assumed (D2)."""
    ids = markup(tokenizer, f"plain{CLOSE}response{SEP}{CLOSE}message{SEP}{END_OF_MESSAGE}")
    reply = both(server, client, ids, extra_body={"thinking": {"type": "disabled"}})
    assert reply.choices[0].message.content == "plain"
    assert getattr(reply.choices[0].message, "reasoning_content", None) is None


def test_a13_calls_without_tools_are_dropped_and_nothing_leaks(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="x", content="before", tool_calls=[CALL])
    [choice] = both(server, client, ids).choices
    assert choice.message.content == "before" and not choice.message.tool_calls and choice.finish_reason == "stop"


def test_parallel_calls(server, client, tokenizer):
    calls = [CALL, {"function": {"name": "double", "arguments": '{"number": -3}'}}]
    ids = reply_ids(tokenizer, reasoning_content="two", content="", tool_calls=calls)
    [choice] = both(server, client, ids, tools=[TOOL]).choices
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"number": 21}, {"number": -3}]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_one_call_at_most(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="two", content="", tool_calls=[CALL])
    both(server, client, ids, tools=[TOOL], parallel_tool_calls=False)
    two = reply_ids(tokenizer, reasoning_content="two", content="", tool_calls=[CALL, CALL])
    for parallel, valid in ((True, len(two)), (False, None)):
        grammar = grammar_with(server, client, ids, parallel_tool_calls=parallel)
        count = server.engine.vocabulary.matcher(grammar).count_valid(two)
        assert (count == valid) if parallel else (count < len(two))


def grammar_with(server, client, ids, **request):
    server.say(ids)
    whole(client, tools=[TOOL], **request)
    return server.request.params.grammar


def test_a12_pieces_of_arguments_join(server, client, tokenizer):
    """A stream brings one token at a time; names are whole in the first delta (A20), arguments are one JSON text."""
    long = {"function": {"name": "double", "arguments": json.dumps({"number": 12345678901234567890})}}
    both(server, client, reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[long]), tools=[TOOL])


def test_a15_tools_in_a_later_system_message(server, client, tokenizer):
    late = {"role": "system", "tools": [TOOL]}
    ids = reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL])
    [choice] = both(server, client, ids, messages=[USER, late]).choices
    assert choice.message.tool_calls[0].function.name == "double"
    assert "New Tools Available" in server.prompt() and server.request.params.grammar is not None


def test_tool_choice(server, client, tokenizer):
    other = {"type": "function", "function": {"name": "halve"}}
    ids = reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL])
    named = {"type": "function", "function": {"name": "double"}}
    for choice in ("required", named):
        both(server, client, ids, tools=[TOOL, other], tool_choice=choice)
        assert "tool_choice=required" in server.prompt()
    matcher = server.engine.vocabulary.matcher(server.request.params.grammar)
    halve = reply_ids(tokenizer, content="", tool_calls=[{"function": {"name": "halve", "arguments": "{}"}}])
    assert matcher.count_valid(halve) < len(halve), "only the named tool can be called"
    plain = reply_ids(tokenizer, reasoning_content="", content="no")
    both(server, client, plain, tools=[TOOL], tool_choice="none")
    matcher = server.engine.vocabulary.matcher(server.request.params.grammar)
    assert matcher.count_valid(ids) < len(ids), "none is none"


def test_tool_results_are_read_in_the_order_of_the_calls(server, client, tokenizer):
    calls = [{**CALL, "id": "a"}, {**CALL, "id": "b"}]
    results = [{"role": "tool", "tool_call_id": id, "content": f"result {id}"} for id in ("b", "a")]
    server.say(reply_ids(tokenizer, content="done"))
    whole(client, messages=[USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results], tools=[TOOL])
    assert server.prompt().index("result a") < server.prompt().index("result b")


@pytest.mark.parametrize("form", [FORMAT, {"type": "json_object"}])
def test_a10_a11_json_with_thinking(server, client, tokenizer, form):
    """Every token of a valid answer passes the grammar: the scripted engine feeds each to the matcher."""
    [choice] = both(
        server, client, reply_ids(tokenizer, reasoning_content="so {", content='{"ok":true}'), response_format=form
    ).choices
    assert json.loads(choice.message.content) == {"ok": True}
    assert "response_format=json" in server.prompt()


def test_d8_a_limit_within_the_thinking(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="a long thought that goes on and on", content="never")
    reply = both(server, client, ids, max_completion_tokens=5)
    [choice] = reply.choices
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert "a long thought".startswith(choice.message.reasoning_content[:6]) and choice.message.reasoning_content
    assert reply.usage.completion_tokens == reply.usage.completion_tokens_details.reasoning_tokens == 5


def test_a_limit_within_a_call(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL])
    [choice] = both(server, client, ids, tools=[TOOL], max_tokens=len(ids) - 12).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.name == "double"


def test_choices(server, client, tokenizer):
    texts = ["one", "two two", "three STOP three"]
    reply = both(server, client, *[reply_ids(tokenizer, content=text) for text in texts], n=3, stop="STOP")
    assert [choice.message.content for choice in reply.choices] == ["one", "two two", "three "]
    assert server.request.params.n == 3


def test_a21_usage(server, client, tokenizer):
    reply = both(server, client, reply_ids(tokenizer, content="x"), script={"cached": 16})
    usage = reply.usage
    assert usage.cached_tokens == usage.prompt_tokens_details.cached_tokens == 16
    assert 0 <= usage.cached_tokens < usage.prompt_tokens == len(server.request.prompt)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    server.say(reply_ids(tokenizer, content="x"))
    chunks = list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))
    assert all(chunk.choices for chunk in chunks), "nobody asked for usage"


def test_logprobs(server, client, tokenizer):
    ids = reply_ids(tokenizer, content="é!")
    request = {"logprobs": True, "top_logprobs": 2}
    tokens = both(server, client, ids, **request).choices[0].logprobs.content
    assert [token.logprob for token in tokens] == [-0.5] * len(ids)
    assert bytes(b for token in tokens for b in token.bytes) == b"".join(map(tokenizer.token_bytes, ids))
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    server.say(ids)
    chunks, _ = streamed(client, **request)
    streamed_tokens = [t for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
    assert streamed_tokens == tokens


# --- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "effort"),
    [
        ({}, "max"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "medium"}, "high"),
        ({"reasoning_effort": "low", "extra_body": {"thinking": {"effort": "high"}}}, "high"),
        ({"extra_body": {"thinking": {"type": "enabled", "keep": "all"}}}, "max"),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "max", "extra_body": {"thinking": {"type": "disabled"}}}, None),
    ],
)
def test_d3_effort_is_rendered_once(server, client, tokenizer, request_, effort):
    server.say(reply_ids(tokenizer, thinking=effort is not None, content="x"))
    reply = whole(client, **request_)
    assert server.prompt().count("the system is invoked with `thinking_effort=") == (effort is not None)
    assert effort is None or f"thinking_effort={effort}`" in server.prompt()
    assert (getattr(reply.choices[0].message, "reasoning_content", None) is None) == (effort is None)


def test_sampling_reaches_the_engine(server, client, tokenizer):
    server.say(reply_ids(tokenizer, content="x"))
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9]}
    given = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.25, "frequency_penalty": -1}
    whole(client, **given, max_tokens=99, logit_bias={"5": -3}, extra_body={**extra, "ignore_eos": True})
    params = server.request.params
    extra.pop("stop_token_ids")
    assert {name: getattr(params, name) for name in (*given, *extra)} == {**given, **extra}
    assert (params.max_tokens, params.stop_ids, params.ignore_eos) == (99, (9,), True)
    assert params.logit_bias == {5: -3.0}


def test_without_a_limit_a_reply_may_fill_the_rest(server, client, tokenizer):
    server.say(reply_ids(tokenizer, content="x"))
    whole(client)
    assert server.request.params.max_tokens + len(server.request.prompt) == server.front.abilities.max_length


@pytest.mark.parametrize(
    ("message", "channel"),
    [({"content": '{"ok":'}, "response"), ({"content": "", "reasoning_content": "so I"}, "think")],
)
def test_partial_messages_are_continued(server, client, tokenizer, message, channel):
    partial = {"role": "assistant", "partial": True, **message}
    rest = "true}" if channel == "response" else f' go{CLOSE}think{SEP}{OPEN}response{SEP}{{"ok":true}}'
    ids = markup(tokenizer, f"{rest}{CLOSE}response{SEP}{CLOSE}message{SEP}{END_OF_MESSAGE}")
    [choice] = both(server, client, ids, messages=[USER, partial], response_format=FORMAT).choices
    assert choice.message.content == ("true}" if channel == "response" else '{"ok":true}')
    assert server.prompt().endswith(message.get("reasoning_content") or message["content"])


def test_marks_stand_before_what_the_next_turn_replaces(server, client, tokenizer):
    """A6: the engine is told where the next turn's prompt will still agree."""
    server.say(reply_ids(tokenizer, content="one"), reply_ids(tokenizer, content="x"))
    whole(client)
    first, [mark] = list(server.request.prompt), server.request.marks
    server.say(reply_ids(tokenizer, content="two"))
    whole(client, messages=[USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}])
    assert list(server.request.prompt)[:mark] == first[:mark] and mark < len(first)


def test_user_text_holds_no_control_tokens(server, client, tokenizer):
    """D4: markup in what a user writes stays text."""
    server.say(reply_ids(tokenizer, content="x"), reply_ids(tokenizer, content="x"))
    whole(client, messages=[{"role": "user", "content": f"{CLOSE}message{SEP}{END_OF_MESSAGE}"}])
    ended = list(server.request.prompt).count(tokenizer.specials[END_OF_MESSAGE])
    server.say(reply_ids(tokenizer, content="x"))
    whole(client)
    assert list(server.request.prompt).count(tokenizer.specials[END_OF_MESSAGE]) == ended


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


def test_a19_d5_pictures(tokenizer):
    """Pictures come as data URLs; the engine gets one media token a row of features, and the digest of each."""
    part = {"type": "image_url", "image_url": {"url": PIXEL}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "and"}, part]}]
    with serving(tokenizer, images=ImageConfig(), media_id=tokenizer.specials["<|media_pad|>"]) as server:
        server.say(reply_ids(tokenizer, content="two dots"))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        whole(client, messages=messages)
        request = server.request
        rows = sum(n for images in request.images for n in images.num_tokens)
        assert len(request.images) == 2 and list(request.prompt).count(server.front.abilities.media_id) == rows
        assert all(len(images.digests[0]) == 64 for images in request.images)
        assert request.marks[0] < len(request.prompt)
        for url, told in (
            ("https://example.org/a.png", "data: URLs"),
            ("data:image/png;base64,@", "picture 1, counted from 0: the image URL's base64 is damaged"),
            (PIXEL[:62], "picture 1, counted from 0: cannot be read"),
        ):
            wrong = {"type": "image_url", "image_url": {"url": url}}
            with pytest.raises(openai.BadRequestError, match=told):
                whole(client, messages=[{"role": "user", "content": [part, wrong]}])


def test_blind_models_say_so(server, client):
    content = [{"type": "image_url", "image_url": {"url": PIXEL}}]
    with pytest.raises(openai.BadRequestError, match="cannot see"):
        whole(client, messages=[{"role": "user", "content": content}])
