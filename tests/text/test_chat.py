"""The chat template: the texts and ids of the official encoder, and the rules of the format."""

import json
import re

import pytest

from rille.text.chat import Prompt, render
from rille.text.tokenizer import Tokenizer
from tests.text.conftest import CLOCK, GOLDEN, USER, WEATHER, call

EFFORT = render([USER]).text.split("<|end_of_msg|>")[0] + "<|end_of_msg|>"


def body(messages: list[dict], **options) -> str:
    """What is rendered between the effort's message and the prefix."""
    text = render(messages, add_generation_prompt=False, **options).text
    return text.removeprefix(EFFORT)


def render_golden(case: dict) -> Prompt:
    options = dict(case["kwargs"])
    if "thinking_effort" in options:
        options["effort"] = options.pop("thinking_effort")
    if "image_prompts" in options:
        sizes = [re.search(r"image (\d+)x(\d+)", prompt) for prompt in options.pop("image_prompts")]
        options["images"] = [(int(size[1]), int(size[2])) for size in sizes if size]
    return render(case["messages"], case["tools"], **options)


@pytest.mark.parametrize("case", GOLDEN["chat"], ids=lambda case: case["name"])
def test_texts_of_the_official_encoder(case: dict):
    assert render_golden(case).text == case["rendered"]


@pytest.mark.parametrize("case", GOLDEN["chat"], ids=lambda case: case["name"])
def test_ids_of_the_official_encoder(official: Tokenizer, case: dict):
    prompt = render_golden(case)
    assert prompt.ids(official) == case["token_ids"]
    assert len(prompt.loss_mask(official)) == len(case["token_ids"])


def test_segments_are_encoded_one_by_one(official: Tokenizer):
    """Encoding the whole text at once gives other ids where quotes meet: the cuts are part of the format."""
    (case,) = [case for case in GOLDEN["chat"] if case["name"] == "attr_escape"]
    assert official.encode_with_specials(case["rendered"]) != case["token_ids"]


# --- history ---


def test_thinking_keeps_an_empty_channel_and_instruct_mode_drops_all():
    history = [USER, {"role": "assistant", "reasoning": "why", "content": "ho"}, {"role": "assistant", "content": None}]
    think, response = "<|open|>think<|sep|>{}<|close|>think<|sep|>", "<|open|>response<|sep|>{}<|close|>response<|sep|>"
    thoughtful = body(history)
    assert think.format("why") + response.format("ho") in thoughtful
    assert think.format("") + response.format("") in thoughtful
    assert "think" not in body(history, thinking=False)
    assert response.format("ho") in body(history, thinking=False)
    assert render([USER], thinking=False, effort="low").channel == "response"


@pytest.mark.parametrize("blank", [None, "", " \n\t"])
def test_blank_reasoning_is_no_reasoning(blank: str | None):
    assert body([{"role": "assistant", "reasoning_content": blank, "reasoning": blank, "content": "x"}]) == body(
        [{"role": "assistant", "content": "x"}]
    )


def test_reasoning_content_goes_before_reasoning():
    assert "think<|sep|>a<|close|>" in body([{"role": "assistant", "reasoning_content": "a", "reasoning": "b"}])
    assert "think<|sep|>b<|close|>" in body([{"role": "assistant", "reasoning_content": "", "reasoning": "b"}])


def test_effort_is_said_once_and_only_when_thinking():
    for effort in ("low", "high", "max"):
        assert render([USER], effort=effort).text.count(f"thinking_effort={effort}`") == 1
    assert "thinking" not in render([USER], effort=None).text
    for effort in ("medium", "", "MAX"):
        with pytest.raises(ValueError, match=f"effort '{effort}' is not one of low, high, max"):
            render([USER], effort=effort)
        with pytest.raises(ValueError, match="is not one of low, high, max"):
            render([USER], effort=effort, thinking=False)


def test_argument_types_and_texts():
    arguments = {"b": True, "i": 1, "f": 1.0, "s": "1", "n": None, "o": {"z": 1, "a": "é"}, "l": [], "e": 1e22}
    text = body([{"role": "assistant", "tool_calls": [call("f", arguments=arguments)]}])
    found = re.findall(r'key="(\w)" type="(\w+)"<\|sep\|>(.*?)<\|close\|>argument', text)
    assert found == [
        ("b", "boolean", "true"),
        ("i", "number", "1"),
        ("f", "number", "1.0"),
        ("s", "string", "1"),
        ("n", "null", "null"),
        ("o", "object", '{"z": 1, "a": "é"}'),
        ("l", "array", "[]"),
        ("e", "number", "1e+22"),
    ]


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}", {}, " {} "])
def test_no_arguments(arguments: object):
    text = body([{"role": "assistant", "tool_calls": [call("f", arguments=arguments)]}])
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in text


@pytest.mark.parametrize("raw", ['{"a": 1', "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000])
def test_arguments_that_are_no_json_stay_as_they_are(raw: str):
    text = body([{"role": "assistant", "tool_calls": [call("f", arguments=raw)]}])
    assert f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|><|close|>call' in text


def test_a_call_may_stand_without_function_around_it():
    flat = {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {"a": 1}}]}
    assert body([flat]) == body([{"role": "assistant", "tool_calls": [call("f", "1", {"a": 1})]}])


def results(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r'role="tool" tool="(\w+)" index="(\d+)"<\|sep\|>(.*?)<\|close\|>message', text)


def test_results_go_into_the_order_of_the_calls():
    calls = {"role": "assistant", "tool_calls": [call("f", "1"), call("g", "2"), call("h", "3")]}

    def result(call_id: str, **more) -> dict:
        return {"role": "tool", "tool_call_id": call_id, "content": f"r{call_id}", **more}

    ordered = body([calls, result("3"), result("1", name="stale"), result("2")])
    assert results(ordered) == [("f", "1", "r1"), ("g", "2", "r2"), ("h", "3", "r3")]
    assert results(body([calls, result("3"), result("1")])) == [("f", "1", "r1"), ("h", "2", "r3")]
    unmatched = body([calls, result("2"), result("9"), result("1", name="own")])
    assert results(unmatched) == [("f", "1", "r2"), ("g", "2", "r9"), ("own", "3", "r1")]
    two_runs = body([calls, result("2"), USER, result("1")])
    assert results(two_runs) == [("g", "1", "r2"), ("f", "2", "r1")]
    by_id = {"role": "tool", "id": 2, "content": "by id"}
    assert results(body([calls, by_id])) == [("g", "1", "by id")]


def test_results_count_from_the_latest_assistant_message_and_the_first_of_equal_ids_counts():
    first = {"role": "assistant", "tool_calls": [call("f", "1")]}
    second = {"role": "assistant", "tool_calls": [call("g", "1"), call("h", "1"), call("i", "2")]}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    last = {"role": "tool", "tool_call_id": "2", "content": "s"}
    text = body([first, result, second, last, result, result])
    assert results(text) == [("f", "1", "r"), ("g", "1", "r"), ("g", "2", "r"), ("i", "3", "s")]


def test_rendering_changes_nothing_that_it_was_given():
    messages = [
        {"role": "assistant", "tool_calls": [call("f", "1", '{"b": 1, "a": 2}'), call("g", "2")]},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    before = json.dumps([messages, WEATHER])
    render(messages, [WEATHER])
    assert json.dumps([messages, WEATHER]) == before


# --- tools and options ---


def test_tools_are_written_sorted_and_whole():
    tool = {"type": "function", "function": {"strict": True, "name": "f", "parameters": {"z": ["b", "a"], "é": None}}}
    declared = render([USER], [tool, CLOCK]).text
    expected = (
        '[{"function":{"name":"f","parameters":{"z":["b","a"],"é":null},"strict":true},"type":"function"},'
        '{"function":{"name":"clock"},"type":"function"}]'
    )
    assert f"```json\n{expected}\n```" in declared
    shuffled = {"function": dict(reversed(tool["function"].items())), "type": "function"}
    assert render([USER], [shuffled, CLOCK]).text == declared


def test_dynamic_tools_stand_where_they_were_declared():
    declares = {"role": "system", "content": "", "tools": [CLOCK]}
    text = render([USER, declares, USER], [WEATHER], tool_choice="required").text
    kinds = re.findall(r'role="(\w+)"(?: type="([\w-]+)")?', text)
    assert kinds == [
        ("system", "tool-declare"),
        ("system", "thinking-effort"),
        ("user", ""),
        ("system", "tool-declare"),
        ("user", ""),
        ("system", "tool-choice"),
        ("assistant", ""),
    ]
    assert text.index("# Tools") < text.index("weather") < text.index("## New Tools Available") < text.index("clock")


def test_tool_choice():
    auto = render([USER], [CLOCK]).text
    assert render([USER], [CLOCK], tool_choice="auto").text == auto
    none = render([USER], tool_choice="none").text
    assert "`tool_choice=none`.\nYou MUST NOT call any tools in the next message.<|close|>" in none
    with pytest.raises(ValueError, match="needs tools"):
        render([USER], tool_choice="required")
    with pytest.raises(ValueError, match="tool_choice 'any' is not one of auto, none, required"):
        render([USER], [CLOCK], tool_choice="any")


def test_response_format():
    assert render([USER], response_format={"type": "text"}).text == render([USER]).text
    free = render([USER], response_format={"type": "json_object"}).text
    assert render([USER], response_format="json_object").text == free
    assert 'type="response-format"<|sep|>The system is invoked with `response_format=json_object`.\nYour' in free
    assert "additional formatting.<|close|>message" in free
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    texts = [
        render([USER], response_format={"type": "json_schema", "json_schema": given}).text
        for given in ({"name": "n", "schema": schema}, {"json_schema": schema}, schema)
    ]
    assert '```json\n{"properties":{"a":{},"b":{}},"type":"object"}\n```<|close|>' in texts[0]
    assert len({*texts}) == 1
