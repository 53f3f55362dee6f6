"""The kinds of public reports on parsing, limits and stops, through every API, whole and streamed.

What one API was seen to get wrong the others could: each reply here is asked for by chat, by Anthropic's messages and
by responses, and must come out as the same reasoning, content, calls and reason to end.
"""

import base64
import io
import json
from functools import cache
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

import rille
from rille.text.images import ImageConfig
from rille.text.markup import IMAGE_PLACEHOLDER
from rille.text.vocabulary import CLOSE, END_OF_MESSAGE, OPEN, SEP
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import serving
from tests.serve.test_api_chat import TOOL, USER
from tests.serve.test_api_others import CLAUDE, FLAT
from tests.serve.test_chat import CALL
from tests.serve.test_engine_text import SEEING
from tests.serve.test_leaks import real_server

TOKENIZER = small_tokenizer()
CALL_TEXT = (
    f'{OPEN}call tool="double" index="1"{SEP}{OPEN}argument key="number" type="number"{SEP}21{CLOSE}argument{SEP}'
)
TOOLS_TEXT = f"{OPEN}tools{SEP}{CALL_TEXT}{CLOSE}call{SEP}{CLOSE}tools{SEP}"
END = f"{CLOSE}message{SEP}{END_OF_MESSAGE}"
CALLED = [("double", {"number": 21})]


@pytest.fixture(scope="module")
def server():
    with serving(TOKENIZER) as served:
        served.engine.is_checking = False
        yield served


@cache
def openai_at(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@cache
def anthropic_at(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


class Said:
    """A reply by one API, in the same words for all."""

    def __init__(self) -> None:
        self.reasoning, self.content, self.calls, self.reason = "", "", [], ""

    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    def __eq__(self, other) -> bool:
        return vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def by_chat(server, stream: bool, limit: int, tools: bool, **more) -> Said:
    client = openai_at(server.url)
    said = Said()
    request: dict = {
        "model": "tiny",
        "messages": [USER],
        "max_tokens": limit,
        **({"tools": [TOOL]} if tools else {}),
        **more,
    }
    if not stream:
        choice = client.chat.completions.create(**request).choices[0]
        said.reasoning, said.content = choice.message.reasoning_content, choice.message.content or ""
        said.calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        said.reason = choice.finish_reason
        return said
    for chunk in client.chat.completions.create(stream=True, **request):
        [choice] = chunk.choices
        said.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        said.content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name is not None:
                assert call.index == len(said.calls)
                said.calls.append((call.function.name, ""))
            name, arguments = said.calls[call.index]
            said.calls[call.index] = (name, arguments + (call.function.arguments or ""))
        said.reason = choice.finish_reason or said.reason
    return said


def by_messages(server, stream: bool, limit: int, tools: bool, stop=None) -> Said:
    client = anthropic_at(server.url)
    request: dict = {"model": "tiny", "messages": [USER], "max_tokens": limit, "thinking": {"type": "adaptive"}}
    request |= ({"tools": [CLAUDE]} if tools else {}) | ({} if stop is None else {"stop_sequences": [stop]})
    said = Said()
    if not stream:
        message = client.messages.create(**request)
        for block in message.content:
            said.reasoning += block.thinking if block.type == "thinking" else ""
            said.content += block.text if block.type == "text" else ""
            if block.type == "tool_use":
                cut = block.input.get("unfinished")
                said.calls.append((block.name, json.dumps(block.input) if cut is None else cut))
        said.reason = message.stop_reason
    else:
        for event in client.messages.create(stream=True, **request):
            if event.type == "content_block_start" and event.content_block.type == "tool_use":
                said.calls.append((event.content_block.name, ""))
            elif event.type == "content_block_delta":
                delta = event.delta
                said.reasoning += delta.thinking if delta.type == "thinking_delta" else ""
                said.content += delta.text if delta.type == "text_delta" else ""
                if delta.type == "input_json_delta":
                    said.calls[-1] = (said.calls[-1][0], said.calls[-1][1] + delta.partial_json)
            elif event.type == "message_delta":
                said.reason = event.delta.stop_reason
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    said.reason = reasons[said.reason]
    return said


def by_responses(server, stream: bool, limit: int, tools: bool) -> Said:
    client = openai_at(server.url)
    request = {"model": "tiny", "input": "hi", "max_output_tokens": limit, **({"tools": [FLAT]} if tools else {})}
    said = Said()
    if not stream:
        response = client.responses.create(**request)
        for item in response.output:
            said.reasoning += item.content[0].text if item.type == "reasoning" else ""
            said.content += item.content[0].text if item.type == "message" else ""
            said.calls += [(item.name, item.arguments)] if item.type == "function_call" else []
    else:
        response: Any = None
        for event in client.responses.create(stream=True, **request):
            said.reasoning += event.delta if event.type == "response.reasoning_text.delta" else ""
            said.content += event.delta if event.type == "response.output_text.delta" else ""
            if event.type == "response.output_item.added" and event.item.type == "function_call":
                said.calls.append((event.item.name, ""))
            elif event.type == "response.function_call_arguments.delta":
                said.calls[-1] = (said.calls[-1][0], said.calls[-1][1] + event.delta)
            response = getattr(event, "response", response)
    said.reason = "length" if response.status == "incomplete" else "tool_calls" if said.calls else "stop"
    return said


APIS = {"chat": by_chat, "messages": by_messages, "responses": by_responses}


def heard(server, ids: list[int], limit: int = 500, tools: bool = True) -> Said:
    """The reply by every API, whole and streamed; all of it the same, arguments by value."""
    every = []
    for ask in APIS.values():
        for stream in (False, True):
            server.say(ids)
            every.append(ask(server, stream, limit, tools))
    first = every[0]
    for said in every[1:]:
        assert (said.reasoning, said.content, said.reason) == (first.reasoning, first.content, first.reason)
        assert [name for name, _ in said.calls] == [name for name, _ in first.calls]
        for (_, mine), (_, other) in zip(said.calls, first.calls, strict=True):
            assert mine == other or json.loads(mine) == json.loads(other)
    return first


def markup(text: str) -> list[int]:
    return TOKENIZER.encode_with_specials(text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"thinking{TOOLS_TEXT}{END}", "thinking", "", CALLED),  # A2: thinking is not closed before the calls
        (f"{OPEN}response{SEP}at once{CLOSE}response{SEP}{END}", "", "at once", []),  # A9: no thinking at all
        (f"so{CLOSE}think{SEP}{OPEN}response{SEP}é 🙂{CLOSE}response{SEP}{TOOLS_TEXT}{END}", "so", "é 🙂", CALLED),
        (f"so{CLOSE}think{SEP}{TOOLS_TEXT}{END}", "so", "", CALLED),  # no response channel before the calls
        (f"so{CLOSE}think{SEP}{OPEN}response{SEP}{CLOSE}response{SEP}{END}", "so", "", []),
    ],
)
def test_a2_a9_a12_whatever_is_skipped(server, text, reasoning, content, calls):
    said = heard(server, markup(text))
    assert (said.reasoning, said.content, said.arguments()) == (reasoning, content, calls)
    assert said.reason == ("tool_calls" if calls else "stop")


def test_a13_calls_without_tools_never_leak(server):
    said = heard(server, reply_ids(TOKENIZER, reasoning_content="x", content="before", tool_calls=[CALL]), tools=False)
    assert (said.content, said.calls, said.reason) == ("before", [], "stop")


def test_d8_a_limit_at_every_place(server):
    """In the thinking, between channels, in the answer, in the name of a call, in its arguments: nothing of the markup
    is told, what was said until then is, and the reason is the limit."""
    ids = reply_ids(TOKENIZER, reasoning_content="é 🙂", content="ok 日", tool_calls=[CALL])
    for limit in [*range(1, len(ids), 3), len(ids) - 1]:
        said = heard(server, ids, limit=limit)
        assert said.reason == "length", limit
        assert "é 🙂".startswith(said.reasoning.rstrip("\ufffd")) and "ok 日".startswith(said.content.rstrip("\ufffd"))
        assert all(name == "double" for name, _ in said.calls)


def test_words_that_the_tokenizer_lacks_are_no_fault_of_a_request(server):
    """A model may have more: in a text and inside of a character they are U+FFFD, in a tag they break it, in a call's
    text they stand as in any other."""
    beyond, half = TOKENIZER.vocab_size + 1, TOKENIZER.encode("é")[:1]
    close, string = f"{CLOSE}think{SEP}{OPEN}response{SEP}", f'{OPEN}argument key="number" type="string"{SEP}'
    call = [*markup(f'{OPEN}tools{SEP}{OPEN}call tool="double" index="1"{SEP}{string}'), beyond]
    call += markup(f"{CLOSE}argument{SEP}{CLOSE}call{SEP}{CLOSE}tools{SEP}{END}")
    tag = [*markup(OPEN), beyond, *markup(SEP)]
    said = heard(
        server, [beyond, *half, beyond, *markup(f"a{close}b"), beyond, *tag, *markup(f"{CLOSE}response{SEP}"), *call]
    )
    assert (said.reasoning, said.content) == ("\ufffd\ufffd\ufffda", "b\ufffd")
    assert said.arguments() == [("double", {"number": "\ufffd"})] and said.reason == "tool_calls"


TEXT = "né 🙂 to be, or not to be 日本"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_stop_string_at_any_place(server, size):
    """Every piece of a text as a stop string, whose characters lie across tokens: what is told ends before it."""
    ids = reply_ids(TOKENIZER, reasoning_content=TEXT, content=TEXT)
    for stop in sorted({TEXT[at : at + size] for at in range(len(TEXT) - size + 1)}):
        for ask in (by_chat, by_messages):
            for stream in (False, True):
                server.say(ids)
                said = ask(server, stream, 500, False, stop=stop)
                assert said.content == TEXT.partition(stop)[0] and said.reasoning == TEXT, (stop, ask, stream)
                assert said.reason == "stop"


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a1_a5_a7_a18_cached_tokens_over_http(drafter):
    """A prompt again, a token longer and a token shorter, around multiples of the unit and far below a page: what can
    be reused is, with guessed tokens and without, and at least one token is computed."""
    config = rille.preset("tiny").replace(vocab_size=TOKENIZER.vocab_size, num_layers=2, mla_layers=(1,))
    unit = 64
    with real_server(rille.new_model(config), TOKENIZER, num_pages=200, hash_unit=unit, drafter=drafter) as (url, _):
        client = openai_at(url)
        for start, length in enumerate((unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit + 17)):
            ids = [5 + (start * 97 + place * place) % 200 for place in range(length + 1)]
            cached = []
            for count in (length, length, length + 1, length - 1):
                usage = client.completions.create(model="small", prompt=ids[:count], max_tokens=9, temperature=0).usage
                assert usage.cached_tokens == usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens == count
                cached.append(usage.cached_tokens)
            assert cached[0] == 0
            assert all(again >= (length - 1) // unit * unit for again in cached[1:3]), (length, cached)
            assert cached[3] >= (length - 2) // unit * unit - unit, (length, cached)


def picture(colour: str) -> str:
    """A data URL."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a19_another_picture_is_another_prompt_over_http():
    """A model that sees, asked by all three APIs: one picture is one prompt for all; with another one nothing behind
    its place is reused, nor is the answer the same."""
    media = TOKENIZER.specials["<|media_pad|>"]
    model = rille.new_model(SEEING.replace(vocab_size=TOKENIZER.vocab_size, media_pad_id=media), seed=2)
    look = ImageConfig(patch=4, merge=2)
    with real_server(model, TOKENIZER, images=look, num_pages=100, hash_unit=64) as (url, _):

        def chat(colour):
            parts = [{"type": "image_url", "image_url": {"url": picture(colour)}}, {"type": "text", "text": "what?"}]
            request = {"model": "small", "messages": [{"role": "user", "content": parts}], "max_tokens": 6}
            reply = openai_at(url).chat.completions.create(**request, temperature=0)
            return reply.choices[0].message.reasoning_content, reply.usage

        (red, cold), (blue, other), (again, warm) = chat("red"), chat("blue"), chat("red")
        assert red == again != blue and cold.cached_tokens == 0
        assert warm.cached_tokens > other.cached_tokens and other.prompt_tokens == warm.prompt_tokens
        parts = [{"type": "input_image", "image_url": picture("red")}, {"type": "input_text", "text": "what?"}]
        asked = {"model": "small", "input": [{"role": "user", "content": parts}], "max_output_tokens": 6}
        response = openai_at(url).responses.create(**asked, temperature=0)
        assert response.output[0].content[0].text == red
        assert response.usage.input_tokens_details.cached_tokens == warm.cached_tokens
        source = {"type": "base64", "media_type": "image/png", "data": picture("red").partition(",")[2]}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        asked = {"model": "small", "messages": [{"role": "user", "content": parts}], "thinking": {"type": "adaptive"}}
        message = anthropic_at(url).messages.create(**asked, max_tokens=6, extra_body={"temperature": 0})
        assert message.content[0].thinking == red
        assert message.usage.cache_read_input_tokens == warm.cached_tokens


def test_log_probabilities_end_with_the_stop_string(server):
    """As many as tokens are counted, whole and streamed."""
    client = openai_at(server.url)
    ids = reply_ids(TOKENIZER, reasoning_content="", content="one STOP and more")
    request = {"model": "tiny", "messages": [USER], "stop": "STOP", "logprobs": True}
    server.say(ids)
    reply = client.chat.completions.create(**request)
    server.say(ids)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(stream=True, stream_options=options, **request)
    streamed = [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert streamed == reply.choices[0].logprobs.content
    assert len(streamed) == reply.usage.completion_tokens == last.usage.completion_tokens < len(ids)


def test_pictures_of_results_go_where_their_results_go():
    """Which the prompt sorts by their calls; and words that spell a picture's place are words."""
    with serving(TOKENIZER, images=ImageConfig(), media_id=TOKENIZER.specials["<|media_pad|>"]) as server:
        calls = [{"id": one, "type": "function", "function": {"name": one, "arguments": "{}"}} for one in "ab"]
        parts = {one: {"type": "image_url", "image_url": {"url": square(side)}} for one, side in (("a", 30), ("b", 60))}
        results = [{"role": "tool", "tool_call_id": one, "content": [parts[one]]} for one in "ba"]
        asked = {"role": "user", "content": f"not {IMAGE_PLACEHOLDER}"}
        server.say(reply_ids(TOKENIZER, content="x"))
        messages = [asked, {"role": "assistant", "tool_calls": calls}, *results]
        assert server.post("/v1/chat/completions", {"messages": messages})[0] == 200
        assert [one.sizes for one in server.request.images] == [((30, 30),), ((60, 60),)]
        prompt = server.prompt()
        assert (
            prompt.index('"tool" tool="a"')
            < prompt.index("30x30")
            < prompt.index('"tool" tool="b"')
            < prompt.index("60x60")
        )
        assert IMAGE_PLACEHOLDER in prompt


def square(side: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
