"""Conversations with a scripted model: turns, tools, interruptions, files; with a real one: memory equals rebuild."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

import rille
from rille.model.vision_config import VisionConfig
from rille.serve.chat import Conversation
from rille.serve.config import ChatConfig
from rille.serve.dialogue import Finished, OutOfRounds, ToolResult
from rille.serve.session import Session
from rille.serve.tools import Toolbox, declare
from rille.text.parser import parse
from rille.text.reply import CallBegin, Content, Reasoning, join_events
from rille.text.tokenizer import TrainedTokenizer
from rille.text.vocabulary import MEDIA_PAD
from tests.serve.scripted import Scripted, reply_ids, small_tokenizer

CONFIG = ChatConfig(checkpoint="none", temperature=0)
CALL = {"id": "x", "type": "function", "function": {"name": "double", "arguments": '{"number": 21}'}}


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@pytest.fixture(scope="module")
def tokenizer() -> TrainedTokenizer:
    return small_tokenizer()


def talk(tokenizer, *replies, config=CONFIG, tools=(), **messages) -> tuple[Conversation, Scripted]:
    model = Scripted(tokenizer, [reply_ids(tokenizer, config.thinking, **reply) for reply in replies])
    toolbox = Toolbox({tool.__name__: declare(tool) for tool in tools}) if tools else None
    return Conversation(model.as_k3, tokenizer, config, toolbox), model


def test_a_turn_streams_and_is_remembered(tokenizer):
    said = {"reasoning_content": "Hm, é.", "content": "Hello\nyou 🙂"}
    chat, _ = talk(tokenizer, said)
    events = list(chat.say("hi"))
    assert [e.text for e in join_events(events) if isinstance(e, Reasoning)] == ["Hm, é."]
    assert "".join(e.text for e in events if isinstance(e, Content)) == said["content"]
    assert sum(isinstance(e, Content) for e in events) > 1, "it streams"
    assert isinstance(events[-1], Finished) and events[-1].reason == "end"
    assert events[-1].reply == parse(reply_ids(tokenizer, **said), tokenizer, start="think")
    assert chat.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", **said}]


def test_a_new_turn_reads_only_what_is_new(tokenizer):
    chat, model = talk(tokenizer, {"content": "one"}, {"content": "two"}, {"content": "three"})
    first = list(chat.say("first"))[-1]
    second = list(chat.say("second"))[-1]
    assert second.kept == first.read + first.new - 1 and second.read < first.read
    chat.config = replace(chat.config, effort="low")  # stands at the head: everything is read again
    third = list(chat.say("third"))[-1]
    assert third.kept == 0
    assert model.read == [first.read, second.read, third.read]


def test_tools_are_called_until_the_model_answers(tokenizer):
    chat, _ = talk(tokenizer, {"content": "", "tool_calls": [CALL, CALL]}, {"content": "It is 42."}, tools=[double])
    events = list(chat.say("twice 21?"))
    assert [e.name for e in events if isinstance(e, CallBegin)] == ["double", "double"]
    assert [e for e in events if isinstance(e, ToolResult)] == [ToolResult("double", "42", False)] * 2
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [m["tool_call_id"] for m in chat.messages[2:4]] == ["call_1", "call_2"]
    assert 'tool="double" index="2"' in chat.prompt()[0].text
    assert [e.kept > 0 for e in events if isinstance(e, Finished)] == [False, True]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"name": "treble", "arguments": "{}"}, "error: there is no tool 'treble'; there are double"),
        ({"name": "double", "arguments": '{"number": "x"}'}, "argument 'number' is string \"x\"; it must be"),
        ({"name": "double", "arguments": "{}"}, "error: missing a required argument: 'number'; the parameters are"),
        ({"name": "double", "arguments": "{broken"}, "error: the arguments are not JSON"),
    ],
)
def test_the_model_is_told_of_its_mistakes(tokenizer, call, told):
    chat, _ = talk(tokenizer, {"tool_calls": [{"function": call}]}, {"content": "Oh."}, tools=[double])
    results = [e for e in chat.say("go") if isinstance(e, ToolResult)]
    assert results[0].failed and told in results[0].text
    assert chat.messages[2]["content"] == results[0].text


def test_rounds_are_bounded(tokenizer):
    calls = {"tool_calls": [CALL]}
    chat, model = talk(tokenizer, *[calls] * 5, config=replace(CONFIG, max_rounds=2), tools=[double])
    assert list(chat.say("go"))[-1] == OutOfRounds(2)
    assert len(model.replies) == 3


def test_without_tools_calls_are_dropped_and_said(tokenizer):
    chat, _ = talk(tokenizer, {"content": "x", "tool_calls": [CALL]})
    last = list(chat.say("go"))[-1]
    assert "declares no tools" in last.reply.faults[0]
    assert "tool_calls" not in chat.messages[-1]


def test_a_limit_cuts_a_reply_and_its_calls(tokenizer):
    ids = reply_ids(tokenizer, content="", tool_calls=[CALL, CALL])
    chat, _ = talk(
        tokenizer,
        {"tool_calls": [CALL, CALL]},
        config=replace(CONFIG, max_new_tokens=len(ids) * 3 // 4),
        tools=[double],
    )
    events = list(chat.say("go"))
    assert events[-1].reason == "limit" and not any(isinstance(e, ToolResult) for e in events)
    assert [m["content"] for m in chat.messages if m["role"] == "tool"] == [
        "error: not carried out, the reply was cut off"
    ]
    chat.prompt()


def test_a_stopped_reply_stays_and_the_next_one_reads_on(tokenizer):
    chat, _ = talk(tokenizer, {"content": "one two three four"}, {"content": "yes"})
    events = chat.say("count")
    while not isinstance(next(events), Content):
        pass
    events.close()
    assert chat.messages[-1]["role"] == "assistant"
    assert "one two three four".startswith(chat.messages[-1]["content"])
    assert list(chat.say("go on"))[-1].kept > 0


def test_nothing_said_is_taken_back(tokenizer):
    chat, model = talk(tokenizer, {"content": "one"})
    logits, model.logits = model.logits, interrupted
    with pytest.raises(KeyboardInterrupt):
        list(chat.say("hi"))
    assert chat.messages == []
    model.logits = logits
    assert list(chat.say("hi"))[-1].reply.content == "one"
    with pytest.raises(ValueError, match="lone surrogate"):
        list(chat.say("\ud800"))
    assert len(chat.messages) == 2


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_stopped_tool_is_answered(tokenizer):
    def wait() -> str:
        """Wait."""
        raise KeyboardInterrupt

    chat, _ = talk(
        tokenizer,
        {"tool_calls": [{"function": {"name": "wait", "arguments": "{}"}}] * 2},
        {"content": "ok"},
        tools=[wait],
    )
    with pytest.raises(KeyboardInterrupt):
        list(chat.say("go"))
    assert [m["content"] for m in chat.messages[2:]] == ["error: not carried out, the user stopped here"] * 2
    list(chat.say("and now?"))


def test_thinking_off_and_system(tokenizer):
    config = replace(CONFIG, thinking=False, system="Be brief.")
    chat, _ = talk(tokenizer, {"content": "ok"}, config=config)
    assert list(chat.say("hi"))[-1].reply.reasoning is None
    assert "thinking_effort" not in chat.prompt()[0].text and "Be brief." in chat.prompt()[0].text
    chat.reset()
    assert chat.history == [{"role": "system", "content": "Be brief."}]


def test_save_and_load(tokenizer, tmp_path):
    chat, _ = talk(tokenizer, {"content": "ok"}, config=replace(CONFIG, system="Be brief."))
    with pytest.raises(ValueError, match="nothing was said"):
        talk(tokenizer)[0].save(tmp_path / "empty.json")
    list(chat.say("hi"))
    chat.save(tmp_path / "talk.json")
    chat.save(tmp_path / "talk.json")
    other, _ = talk(tokenizer, {"content": "again"})
    other.load(tmp_path / "talk.json")
    assert other.history == chat.history and other.system == "Be brief."
    list(other.say("more"))
    (tmp_path / "notes.txt").write_text("dear diary")
    for act in (other.save, other.load):
        with pytest.raises(ValueError, match="holds no conversation"):
            act(tmp_path / "notes.txt")
    for name, content in {
        "none": {},
        "role": [{"role": "x"}],
        "partial": [{"role": "assistant", "partial": True}],
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=name):
            other.load(tmp_path / name)


def test_a_tokenizer_without_the_format_is_refused(tokenizer):
    old = small_tokenizer()
    del old.specials["<|open|>"]
    with pytest.raises(ValueError, match=r"not trained on the chat format: its tokenizer lacks <\|open\|>\. Use"):
        Conversation(Scripted(tokenizer, []).as_k3, old, CONFIG)


# --- with a real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tokenizer) -> rille.model.model.K3:
    config = rille.preset("tiny").replace(vocab_size=400, num_layers=4, mla_layers=(3,))
    tower = VisionConfig(text_width=96, width=32, num_layers=1, num_heads=2, qkv_width=48, mlp_width=64)
    return rille.new_model(config.replace(media_pad_id=tokenizer.specials[MEDIA_PAD], vision=tower))


def test_memory_equals_rebuild(seeing, tokenizer, tmp_path):
    """What a reused memory says, a new one says that reads the whole history."""
    Image.new("RGB", (60, 40), "teal").save(tmp_path / "teal.png")
    chat = Conversation(seeing, tokenizer, replace(CONFIG, max_new_tokens=12))
    kept = []
    for text, picture in (("one", None), ("two", "teal.png"), ("three", None), ("four", "teal.png")):
        if picture:
            assert chat.attach(tmp_path / picture).num_tokens == (6,)
        before = list(chat.history), list(chat.pending)
        last = list(chat.say(text))[-1]
        kept.append(last.kept > 0)
        fresh = Conversation(seeing, tokenizer, chat.config)
        fresh.messages, fresh.pending = before
        assert list(fresh.say(text))[-1].reply == last.reply
    assert fresh.messages == chat.messages


def test_session_continues_with_pictures(seeing, tokenizer):
    pad = tokenizer.specials[MEDIA_PAD]
    red, blue = (rille.preprocess_images([Image.new("RGB", (60, 40), colour)]) for colour in ("red", "blue"))
    session, ids = Session(seeing), [5, pad, 6, 7]
    session.read(ids, [red])
    session.extend(9)
    whole = [*ids, 9, 8, pad, 3]
    continued = session.read(whole, [red, blue])
    assert (session.num_kept, session.num_read) == (5, 3)
    assert torch.allclose(continued, Session(seeing).read(whole, [red, blue]), atol=1e-4)
    session.read(whole + [1], [blue, blue])
    assert session.num_kept == 0, "another picture in the same place is another history"


def test_blind_models_and_bad_pictures(tokenizer, seeing, tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="this checkpoint cannot see"):
        talk(tokenizer)[0].attach(tmp_path / "a.png")
    chat = Conversation(seeing, tokenizer, CONFIG)
    (tmp_path / "b.png").write_bytes(b"no picture")
    for name in ("absent.png", "b.png"):
        with pytest.raises(ValueError, match=name):
            chat.attach(tmp_path / name)
    assert not chat.pending
