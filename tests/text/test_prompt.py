"""A prompt as ids: what others wrote never becomes a control token, what the loss covers, what stays open."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.text.chat import render
from rille.text.markup import IMAGE_PLACEHOLDER, escape, image_prompt, read_tag, unescape
from rille.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from rille.text.vocabulary import CHAT_SPECIALS
from tests.text.conftest import CLOCK, USER, call
from tests.text.test_parser import messages


def test_every_control_token_is_one_id_and_tag_names_are_plain(either: Tokenizer):
    ids = render([USER]).ids(either)
    named = [either.special_name(i) for i in ids]
    assert [name for name in named if name] == re.findall(r"<\|\w+\|>", render([USER]).text)
    opened = ids.index(either.specials["<|open|>"])
    assert ids[opened + 1 :][: len(either.encode("message"))] == either.encode("message")


def test_chat_needs_control_tokens(tmp_path):
    file = train_tokenizer(["x"], 300, note=lambda _: None).save(tmp_path)
    content = json.loads(file.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|sep|>"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no special token '<\|sep\|>', without which there is no chat"):
        render([USER]).ids(load_tokenizer(file))


# --- what others wrote can never become a control token ---

texts = st.text(st.characters(exclude_categories=("Cs",)))
hostile = st.lists(
    st.one_of(
        texts,
        st.sampled_from(
            [*CHAT_SPECIALS, IMAGE_PLACEHOLDER, "<|end_of_text|>", "[EOS]", '"', "&quot;", "message", "🙂"]
        ),
    ),
    max_size=6,
).map("".join)
names = hostile.filter(bool)


@settings(max_examples=150, deadline=None)
@given(hostile, names, hostile, names, hostile)
def test_no_text_of_others_becomes_a_control_token(
    small: Tokenizer, text: str, name: str, result: str, key: str, value
):
    messages = [
        {"role": "system", "content": text, "name": name},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "reasoning_content": text, "tool_calls": [call(name, "1", {key: value, "o": {key: 1}})]},
        {"role": "tool", "tool_call_id": "1", "content": result},
        {"role": "assistant", "tool_calls": [call(name, "2", text + "{")]},
    ]
    tool = {"type": "function", "function": {"name": name, "description": text}}
    prompt = render(messages, [tool], response_format={"type": "json_schema", "json_schema": {"schema": {key: value}}})
    written = [small.special_name(i) for i in prompt.ids(small)]
    ours = [s.text for s in prompt.segments if s.special]
    assert [name for name in written if name] == ours
    assert {*ours} == {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
    assert small.decode(prompt.ids(small)) == prompt.text


@pytest.mark.parametrize("unit", ["a", "<|open|>", "<|end_of_msg|>\n", IMAGE_PLACEHOLDER, "🙂", " "])
def test_a_megabyte_from_a_user(either: Tokenizer, unit: str):
    text = unit * (1_000_000 // len(unit.encode()))
    empty, full = (render([{"role": "user", "content": t}]).ids(either) for t in ("", text))
    written = either.encode(text)
    assert len(full) == len(empty) + len(written)
    assert not {*written} & {*either.specials.values()}
    assert either.decode(written) == text


@given(hostile)
def test_attribute_values_come_back(value: str):
    assert unescape(escape(value)) == value
    assert '"' not in escape(value)
    assert read_tag(f'call tool="{escape(value)}" index="1"') == ("call", {"tool": value, "index": "1"})


@pytest.mark.parametrize("header", ["", " ", "a b", 'a b="', 'a b=""c""', "a\n", 'a  b="c"', '"', 'a b="c" '])
def test_headers_that_are_no_tag(header: str):
    assert read_tag(header) is None


# --- pictures ---


def test_pictures_take_their_places_in_order(either: Tokenizer):
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"and {IMAGE_PLACEHOLDER}?"}]},
        {"role": "assistant", "content": "seen", "tool_calls": [call("f", "1", {"p": IMAGE_PLACEHOLDER})]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ]
    sizes = [(1, 2), (30, 40), (5, 6), (7, 8)]
    prompt = render(messages, images=sizes)
    pictures = re.findall(
        r"<\|media_begin\|>image (\d+)x(\d+)<\|media_content\|><\|media_pad\|><\|media_end\|>", prompt.text
    )
    assert [(int(w), int(h)) for w, h in pictures] == sizes
    assert prompt.ids(either).count(either.specials["<|media_pad|>"]) == 4
    assert render(messages).text.count(IMAGE_PLACEHOLDER) == 4
    assert not {*map(either.specials.get, CHAT_SPECIALS[4:])} & {*render(messages).ids(either)}
    for wrong in (sizes[:3], [*sizes, (1, 1)], []):
        with pytest.raises(ValueError, match=f"places for 4 images .* but {len(wrong)} were given"):
            render(messages, images=wrong)


def test_the_model_never_learns_to_write_a_picture(small: Tokenizer):
    encoded = render([{"role": "assistant", "content": f"a{IMAGE_PLACEHOLDER}b"}], images=[(9, 9)]).encode(small)
    mask = dict(zip(encoded.ids, encoded.loss_mask, strict=True))
    assert not any(mask[small.specials[name]] for name in CHAT_SPECIALS[4:])


@pytest.mark.parametrize("size", [(0, 5), (5, -1), ("1", 2), ("1<|open|>", 2), (1.5, 2)])
def test_sizes_are_numbers(size: tuple):
    with pytest.raises(ValueError, match="two positive integers"):
        image_prompt(*size)


# --- what the assistant must produce ---

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    USER,
    {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call("f", "1", {"a": "x", "b": 2})]},
    {"role": "tool", "tool_call_id": "1", "content": "r"},
    {"role": "assistant", "content": "done"},
    USER,
    {"role": "assistant", "content": "again"},
]


@pytest.mark.parametrize("thinking", [True, False])
def test_loss_mask_covers_what_follows_the_prompt_and_nothing_else(either: Tokenizer, thinking: bool):
    whole = render(CONVERSATION, thinking=thinking, add_generation_prompt=False).encode(either)
    expected = [False] * len(whole.ids)
    for i, message in enumerate(CONVERSATION):
        if message["role"] == "assistant":
            prompt = render(CONVERSATION[:i], thinking=thinking).ids(either) if i else []
            through = render(CONVERSATION[: i + 1], thinking=thinking, add_generation_prompt=False).ids(either)
            assert whole.ids[: len(prompt)] == prompt
            assert whole.ids[: len(through)] == through
            expected[len(prompt) : len(through)] = [True] * (len(through) - len(prompt))
    assert whole.loss_mask == expected
    assert whole.ids[-1] == either.specials["<|end_of_msg|>"]
    assert not any(render(CONVERSATION[:2], thinking=thinking).loss_mask(either))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(hostile, messages()), min_size=1, max_size=3), st.booleans())
def test_loss_mask_of_any_conversation(small: Tokenizer, turns: list[tuple[str, dict]], thinking: bool):
    """What stands between a turn's prompt and the end of its message is learned, and no id besides."""
    for _, reply in turns:
        reply.pop("name", None)  # of a name the prompt knows nothing
    conversation = [m for text, reply in turns for m in ({"role": "user", "content": text}, reply)]
    whole = render(conversation, thinking=thinking, add_generation_prompt=False).encode(small)
    learned = [False] * len(whole.ids)
    for turn in range(len(turns)):
        asked = len(render(conversation[: 2 * turn + 1], thinking=thinking).ids(small))
        through = render(conversation[: 2 * turn + 2], thinking=thinking, add_generation_prompt=False).ids(small)
        learned[asked : len(through)] = [True] * (len(through) - asked)
    assert whole.loss_mask == learned


def test_text_that_is_no_json_is_not_learned(small: Tokenizer):
    prompt = render([{"role": "assistant", "tool_calls": [call("f", "1", '{"a')]}])
    learned = "".join(s.text for s in prompt.segments if s.produced)
    assert learned == (
        "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
    )


# --- where the next turn begins ---


def test_what_the_next_turn_shares(either: Tokenizer):
    first = render(CONVERSATION[:2], [CLOCK], tool_choice="required").encode(either)
    second = render(CONVERSATION[:4], [CLOCK]).encode(either)
    assert first.ids[: first.num_stable] == second.ids[: first.num_stable]
    assert first.ids[first.num_stable - 1] == either.specials["<|end_of_msg|>"]
    assert either.decode(first.ids[-first.num_opening :]) == "<|open|>think<|sep|>"
    assert render([USER], add_generation_prompt=False).encode(either).num_opening == 0


def test_partial_messages_are_left_open(either: Tokenizer):
    opened = {"role": "assistant", "content": "{", "name": "Kai", "partial": True}
    prompt = render([USER, opened], response_format="json_object")
    assert prompt.text.endswith(
        '<|end_of_msg|><|open|>message role="assistant" name="Kai"<|sep|>'
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>{"
    )
    assert prompt.channel == "response"
    assert prompt.encode(either).num_opening == len(either.encode("response")) + 2
    assert not any(prompt.loss_mask(either))
    instruct = render([USER, opened], thinking=False)
    assert instruct.text.endswith('name="Kai"<|sep|><|open|>response<|sep|>{')
    thought = render([USER, {"role": "assistant", "reasoning": "Let me"}], partial=True)
    assert thought.text.endswith("<|open|>think<|sep|>Let me")
    assert thought.channel == "think"
    assert render([USER, {"role": "assistant", "content": ""}], partial=True).text == render([USER]).text


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([USER], {"partial": True}),
        ([{"role": "user", "content": "x", "partial": True}], {}),
        ([{"role": "assistant", "tool_calls": [call("f")], "partial": True}], {}),
        ([{"role": "assistant", "content": "x"}], {"partial": True, "add_generation_prompt": False}),
    ],
)
def test_what_cannot_be_partial(messages: list[dict], options: dict):
    with pytest.raises(ValueError, match="only a last message of the assistant"):
        render(messages, **options)


def test_only_the_last_message_can_be_partial():
    with pytest.raises(ValueError, match=r"messages\[0\] is partial; only the last"):
        render([{"role": "assistant", "content": "x", "partial": True}, USER])
