"""Anthropic's messages and responses: through the clients that people use, streamed and whole."""

import json

import anthropic
import pytest

from rille.serve.history import from_anthropic, from_responses
from rille.text.images import ImageConfig
from rille.text.vocabulary import CLOSE, OPEN, SEP
from tests.serve.scripted import reply_ids
from tests.serve.served import serving
from tests.serve.test_api_chat import PIXEL, SCHEMA, TOOL, USER
from tests.serve.test_chat import CALL

FLAT = {"type": "function", "name": "double", "parameters": TOOL["function"]["parameters"]}
CLAUDE = {"name": "double", "description": "Twice.", "input_schema": TOOL["function"]["parameters"]}


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


# --- Anthropic --------------------------------------------------------------------------------------------------------


def ask(claude, **request):
    return claude.messages.create(**{"model": "tiny", "max_tokens": 200, "messages": [USER], **request})


def both(server, claude, ids, cached=0, **request):
    """The message, whole and streamed, which must be equal but for ids."""
    for _ in range(2):
        server.say(ids, cached=cached)
    message = ask(claude, **request)
    with claude.messages.stream(**{"model": "tiny", "max_tokens": 200, "messages": [USER], **request}) as stream:
        final = stream.get_final_message()
    plain = [one.model_dump(exclude={"id"}, exclude_none=True) for one in message.content]
    assert [
        one.model_dump(include=set(kept), exclude={"id"}) for one, kept in zip(final.content, plain, strict=True)
    ] == plain
    assert (final.stop_reason, final.stop_sequence) == (message.stop_reason, message.stop_sequence)
    assert final.usage.output_tokens == message.usage.output_tokens
    assert final.usage.input_tokens == message.usage.input_tokens
    assert final.usage.cache_read_input_tokens == message.usage.cache_read_input_tokens == cached
    return message


def test_messages(server, claude, tokenizer):
    ids = reply_ids(tokenizer, thinking=False, content="Hello é")
    message = both(server, claude, ids, cached=5, system="Be brief.")
    assert [block.text for block in message.content] == ["Hello é"] and message.stop_reason == "end_turn"
    assert message.usage.input_tokens == len(server.request.prompt) - 5
    assert "Be brief." in server.prompt() and "thinking_effort" not in server.prompt()


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "max"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, "high"),
    ],
)
def test_messages_with_thinking(server, claude, tokenizer, given, effort):
    message = both(server, claude, reply_ids(tokenizer, reasoning_content="Hm, é", content="yes"), **given)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Hm, é" and message.content[0].signature
    assert f"thinking_effort={effort}`" in server.prompt()


def test_messages_with_tools(server, claude, tokenizer):
    ids = reply_ids(tokenizer, thinking=False, content="I ask.", tool_calls=[CALL, CALL])
    message = both(server, claude, ids, tools=[CLAUDE])
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[1].input == {"number": 21} and message.stop_reason == "tool_use"
    one = reply_ids(tokenizer, thinking=False, content="", tool_calls=[CALL])
    for choice, said in (
        ({"type": "any"}, "tool_choice=required"),
        ({"type": "tool", "name": "double", "disable_parallel_tool_use": True}, "tool_choice=required"),
    ):
        both(server, claude, one, tools=[CLAUDE], tool_choice=choice)
        assert said in server.prompt()
    matcher = server.engine.vocabulary.matcher(server.request.params.grammar)
    assert matcher.count_valid(ids) < len(ids), "one call at most"


def test_blocks_stand_in_the_order_in_which_they_were_written(server, claude, tokenizer, monkeypatch):
    """A model may think late, and speak on behind that."""
    monkeypatch.setattr(server.engine, "is_checking", False)
    late = f"one{OPEN}think{SEP}hm{CLOSE}think{SEP}{OPEN}response{SEP}two{CLOSE}response{SEP}{CLOSE}message{SEP}"
    message = both(server, claude, tokenizer.encode_with_specials(late))
    assert [block.type for block in message.content] == ["text", "thinking", "text"]


def test_messages_stop_and_length(server, claude, tokenizer):
    ids = reply_ids(tokenizer, thinking=False, content="three STOP four")
    message = both(server, claude, ids, stop_sequences=["STOP"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("three ", "stop_sequence", "STOP")
    assert both(server, claude, ids, max_tokens=3).stop_reason == "max_tokens"


def test_messages_continue_the_assistant(server, claude, tokenizer):
    ids = reply_ids(tokenizer, thinking=False, content="and so on")
    both(server, claude, ids, messages=[USER, {"role": "assistant", "content": "It goes on "}])
    assert server.prompt().endswith("It goes on ")


def test_what_clients_set_to_nothing_is_taken(server, claude, tokenizer):
    server.say(reply_ids(tokenizer, thinking=False, content="x"))
    kept = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    tool = {**CLAUDE, "type": None, "defer_loading": False, "input_examples": None, **kept}
    assert ask(claude, tools=[tool], thinking={"type": "disabled"}).content[0].text == "x"


def test_messages_with_a_form(server, claude, tokenizer):
    ids = reply_ids(tokenizer, thinking=False, content='{"ok":true}')
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = both(server, claude, ids, output_config=config)
    assert json.loads(message.content[0].text) == {"ok": True} and server.request.params.grammar is not None


HISTORIES = {
    "without thinking": [],
    "signed elsewhere": [{"type": "thinking", "thinking": "hm", "signature": "Zm9yZWlnbg=="}],
    "unsigned": [{"type": "thinking", "thinking": "hm", "signature": ""}],
    "redacted": [{"type": "redacted_thinking", "data": "AAAA"}],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_d9_any_history_of_thinking_is_taken(server, claude, tokenizer, name):
    use = {"type": "tool_use", "id": "toolu_1", "name": "double", "input": {"number": 21}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "forty-two"}]}
    messages = [
        USER,
        {"role": "assistant", "content": [*HISTORIES[name], use]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, result]},
    ]
    ids = reply_ids(tokenizer, reasoning_content="", content="42")
    both(server, claude, ids, messages=messages, tools=[CLAUDE], thinking={"type": "adaptive"})
    prompt = server.prompt()
    assert prompt.index("forty-two") < prompt.index("and?") and ("hm" in prompt) == ("signed" in name)
    assert 'role="tool"' in prompt and 'tool="double"' in prompt


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_numbers_that_no_reply_could_hold_come_as_they_were_written(server, claude, tokenizer, number):
    """A grammar lets any number of JSON through; one that is infinite here has no place in an object of JSON."""
    call = {**CALL, "function": {"name": "double", "arguments": '{"number": 21}'}}
    ids = reply_ids(tokenizer, thinking=False, content="", tool_calls=[call])
    at, old = next((i, n) for i in range(len(ids)) for n in (1, 2) if tokenizer.decode(ids[i : i + n]) == "21")
    server.say([*ids[:at], *tokenizer.encode(number), *ids[at + old :]])
    schema = {"type": "object", "properties": {"number": {"type": "number"}}, "required": ["number"]}
    message = ask(claude, tools=[{**CLAUDE, "input_schema": schema}])
    [block] = [block for block in message.content if block.type == "tool_use"]
    assert block.input == {"unfinished": f'{{"number": {number}}}'} and message.stop_reason == "tool_use"


def test_arguments_of_any_depth_come_back(server, claude, tokenizer, monkeypatch):
    """As objects, or as they were written where no reader is sure to take them."""
    monkeypatch.setattr(server.engine, "is_checking", False)
    ids = reply_ids(tokenizer, thinking=False, content="", tool_calls=[CALL])
    begun, ended = tokenizer.decode(ids).replace('"number"', '"n"', 1).replace('"number"', '"array"', 1).split("21")
    for depth in (5, 300, *range(700, 1100, 10)):
        text = "[" * depth + "]" * depth
        server.say(tokenizer.encode_with_specials(begun + text + ended))
        [block] = ask(claude, tools=[CLAUDE], max_tokens=3000).content
        said = block.input.get("unfinished", json.dumps(block.input))
        assert said in (f'{{"n": {text}}}', f'{{"n": "{text}"}}')


def test_the_clients_tool_runner_goes_on_without_a_thread(server, claude, tokenizer):
    """It asks for a conversation that the server keeps, unless it is told in its own words that there is none."""

    @anthropic.beta_tool
    def double(number: int) -> str:
        """Twice a number.

        Args:
            number: which one.
        """
        return str(2 * number)

    server.say(reply_ids(tokenizer, thinking=False, content="", tool_calls=[CALL]))
    server.say(reply_ids(tokenizer, thinking=False, content="42 it is"))
    request = {"model": "tiny", "max_tokens": 400, "messages": [USER], "tools": [double]}
    assert claude.beta.messages.tool_runner(**request).until_done().content[0].text == "42 it is"
    assert "42" in server.prompt() and 'role="tool"' in server.prompt()


def test_count_tokens(server, claude, tokenizer):
    server.say(reply_ids(tokenizer, thinking=False, content="x"))
    request = {"messages": [USER], "system": "Be brief.", "tools": [CLAUDE]}
    ask(claude, **request)
    assert claude.messages.count_tokens(model="tiny", **request).input_tokens == len(server.request.prompt)


def test_messages_with_pictures(tokenizer):
    with serving(tokenizer, images=ImageConfig(), media_id=tokenizer.specials["<|media_pad|>"]) as server:
        server.say(reply_ids(tokenizer, thinking=False, content="a dot"))
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
        claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        assert ask(claude, messages=[{"role": "user", "content": content}]).content[0].text == "a dot"
        assert len(server.request.images) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "a"}]},
        {"tool_choice": {"type": "tool"}, "tools": [CLAUDE]},
        {"thinking": {"type": "dreaming"}},
        {"output_config": {"format": {"type": "yaml"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}},
        {"output_config": {"effort": "immense"}},
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "immense"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"thinking": {"type": "disabled", "budget_tokens": 2000}},
        {"thinking": {"type": "adaptive", "budget_tokens": 2000}},
        {"tools": [{**CLAUDE, "defer_loading": True}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}},
        {"tools": [{**CLAUDE, "input_examples": [{"number": 1}]}]},
        {"unknown_thing": 1},
    ],
)
def test_messages_refused(server, wrong):
    status, body, _ = server.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [USER], **wrong})
    assert status == 400 and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


# --- responses --------------------------------------------------------------------------------------------------------


def respond(server, client, ids, cached=0, **request):
    """The response, whole and streamed, which must be equal but for ids and times."""
    for _ in range(2):
        server.say(ids, cached=cached)
    response = client.responses.create(**{"model": "tiny", "input": "hi", **request})
    events = list(client.responses.create(stream=True, **{"model": "tiny", "input": "hi", **request}))
    last = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert last.status == response.status and last.usage == response.usage
    assert [without_ids(one) for one in last.output] == [without_ids(one) for one in response.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text == last.output_text
    return response, events


def without_ids(item):
    return item.model_dump(exclude={"id", "call_id"})


def test_responses(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="Hm, é", content="Hello 🙂")
    response, events = respond(server, client, ids, cached=7, instructions="Be brief.", reasoning={"effort": "low"})
    assert response.output_text == "Hello 🙂" and response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Hm, é"
    assert response.usage.input_tokens_details.cached_tokens == 7 < response.usage.input_tokens
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens == len(ids)
    assert "Be brief." in server.prompt() and "thinking_effort=low`" in server.prompt()
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed" and kinds.count("response.output_item.done") == 2


def test_responses_with_tools(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL, CALL])
    response, events = respond(server, client, ids, tools=[FLAT], tool_choice="required")
    assert [json.loads(item.arguments) for item in response.output] == [{"number": 21}] * 2
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == "".join(item.arguments for item in response.output)
    history = [
        {"role": "user", "content": "twice 21?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "a", "name": "double", "arguments": '{"number": 21}'},
        {"type": "function_call_output", "call_id": "a", "output": "forty-two"},
    ]
    respond(server, client, reply_ids(tokenizer, reasoning_content="", content="42"), input=history, tools=[FLAT])
    assert "I ask." in server.prompt() and "forty-two" in server.prompt()


def test_responses_with_a_form_and_a_limit(server, client, tokenizer):
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    ids = reply_ids(tokenizer, reasoning_content="", content='{"ok":true}')
    assert respond(server, client, ids, text=form)[0].output_text == '{"ok":true}'
    response, events = respond(server, client, ids, max_output_tokens=len(ids) - 8)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


def test_responses_that_fail(server, client, tokenizer):
    server.say(reply_ids(tokenizer, content="x"), reason="error", error="no numbers")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].type == "response.failed" and "no numbers" in events[-1].response.error.message
    [said] = events[-1].response.output
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said.content[0].text == told == "x", "what there was until then"


@pytest.mark.parametrize(
    "wrong",
    [
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        {"input": []},
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"reasoning": {"effort": "immense"}},
        {"background": True},
        {"include": ["message.output_text.logprobs"]},
        {"top_logprobs": 3},
        {"stream_options": {"include_usage": True}, "stream": True},
        {"stream_options": {"include_obfuscation": False}},
        {"reasoning": {"summary": "epic"}},
        {"text": {"verbosity": "low"}},
        {"tools": [{**FLAT, "defer_loading": True}]},
        {"text": {"format": {"type": "json_object", "schema": SCHEMA}}},
    ],
)
def test_responses_refused(server, wrong):
    status, body, _ = server.post("/v1/responses", {"input": "hi", **wrong})
    assert status == 400 and body["error"]["message"]


# --- histories --------------------------------------------------------------------------------------------------------


def test_turns_of_an_assistant_become_one_message():
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "s"}]}
    made = from_responses([thought, said, call, call, thought, call, said, said], None, None).messages
    assert [(m["reasoning_content"], m["content"], len(m.get("tool_calls", []))) for m in made] == [
        ("t", "s", 2),
        ("t", "", 1),
        ("", "s", 0),
        ("", "s", 0),
    ]


def test_system_texts_are_joined_and_results_come_first():
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    result = {"type": "tool_result", "tool_use_id": "x"}
    listed = from_anthropic([{"role": "user", "content": [{"type": "text", "text": "t"}, result]}], system, None)
    assert [(m["role"], m["content"]) for m in listed.messages] == [
        ("system", "ab"),
        ("tool", ""),
        ("user", [{"type": "text", "text": "t"}]),
    ]
