"""`rille chat URL`: the same conversation as on a checkpoint, with a server that says what a script says."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from threading import Thread

import pytest

from rille import cli
from rille.serve.api import Limits
from rille.serve.config import ChatConfig
from rille.serve.dialogue import Finished, ToolResult
from rille.serve.remote import RemoteDialogue, _Heard
from rille.serve.screen import Screen
from rille.serve.terminal import Terminal
from rille.serve.tools import Toolbox, declare
from rille.text.images import ImageConfig
from rille.text.reply import CallArguments, CallBegin, CallEnd, Content, Reasoning, join_events
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import serving, until
from tests.serve.test_chat import CALL, double


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def server(tokenizer):
    with serving(tokenizer, images=ImageConfig(), media_id=tokenizer.specials["<|media_pad|>"]) as served:
        yield served


def talk(server, *, tools=(), **settings) -> RemoteDialogue:
    toolbox = Toolbox({tool.__name__: declare(tool) for tool in tools}) if tools else None
    return RemoteDialogue(ChatConfig(checkpoint=server.url, temperature=0, **settings), toolbox)


def test_a_turn_streams_and_is_remembered(server, tokenizer):
    said = {"reasoning_content": "Hm, é.", "content": "Hello\nyou 🙂"}
    server.say(ids := reply_ids(tokenizer, **said), cached=9, gap_s=0.02)
    chat = talk(server, system="Be brief.")
    events = list(chat.say("hi"))
    assert [type(event) for event in join_events(events[:-1])] == [Reasoning, Content] and len(events) > 3, "it streams"
    assert chat.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", **said}]
    last = events[-1]
    assert isinstance(last, Finished) and last.reason == "end" and last.new == len(ids)
    assert (last.kept, last.read) == (9, len(server.request.prompt) - 9)
    assert "Be brief." in server.prompt() and chat.longest == 4000 and chat.model == "tiny"


def test_tools_are_carried_out_here(server, tokenizer):
    server.say(reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL, CALL]))
    server.say(reply_ids(tokenizer, reasoning_content="", content="It is 42."))
    chat = talk(server, tools=[double])
    events = list(chat.say("twice 21?"))
    calls = [one for one in join_events(events) if isinstance(one, CallBegin | CallArguments | CallEnd)]
    assert calls == [
        one for i in (0, 1) for one in (CallBegin(i, "double"), CallArguments(i, '{"number": 21}'), CallEnd(i, True))
    ]
    assert [event.text for event in events if isinstance(event, ToolResult)] == ["42", "42"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def test_limits_cut_calls(server, tokenizer):
    server.say(ids := reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL, CALL]))
    chat = talk(server, tools=[double], max_new_tokens=len(ids) * 3 // 4)
    last = list(chat.say("go"))[-1]
    assert last.reason == "limit" and not last.reply.complete
    assert [m["content"] for m in chat.messages if m["role"] == "tool"] == [
        "error: not carried out, the reply was cut off"
    ]


def test_a_stopped_reply_stays_and_ends_in_the_server(server, tokenizer):
    server.say(reply_ids(tokenizer, content="one two three")[:-4], hold=True)
    chat = talk(server)
    events = chat.say("count")
    while not isinstance(next(events), Content):
        pass
    events.close()
    assert chat.messages[-1]["role"] == "assistant" and chat.messages[-1]["content"]
    until(lambda: server.engine.aborted)


def test_thinking_effort_and_pictures(server, tokenizer, tmp_path):
    from PIL import Image

    Image.new("RGB", (60, 40), "teal").save(tmp_path / "teal.png")
    chat = talk(server, thinking=False)
    assert chat.attach(tmp_path / "teal.png").num_tokens == (6,)
    server.say(reply_ids(tokenizer, thinking=False, content="teal"))
    assert list(chat.say("what?"))[-1].reply.reasoning is None
    assert len(server.request.images) == 1
    chat.config = replace(chat.config, thinking=True, effort="low")
    server.say(reply_ids(tokenizer, reasoning_content="", content="x"))
    list(chat.say("and?"))
    assert "thinking_effort=low`" in server.prompt()
    chat.save(tmp_path / "talk.json")
    other = talk(server)
    other.load(tmp_path / "talk.json")
    assert other.history == chat.history


def test_the_terminal_does_not_know_the_difference(server, tokenizer, capsys):
    server.say(reply_ids(tokenizer, reasoning_content="Twice.", content="It is\n42."))
    Terminal(talk(server), Screen(False)).take("twice 21?")
    out, err = capsys.readouterr()
    assert out == "It is\n42.\n" and err == "Twice.\n"


def test_what_the_server_refuses(server, tokenizer, monkeypatch):
    chat = talk(server)
    server.say(reply_ids(tokenizer, content="x"), reason="error", error="logits are not finite")
    with pytest.raises(ValueError, match="logits are not finite"):
        list(chat.say("hi"))
    with serving(tokenizer, Limits(keys=("secret",))) as closed:
        with pytest.raises(ValueError, match="no valid API key"):
            talk(closed)
        monkeypatch.setenv("RILLE_API_KEY", "secret")
        assert talk(closed).model == "tiny"
    for setting in ({"device": "cuda"}, {"dtype": "bf16"}, {"experts": "mxfp4"}):
        with pytest.raises(ValueError, match="device, dtype and experts are the server's"):
            talk(server, **setting)


def test_no_server(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert cli.main(["chat", f"http://127.0.0.1:{port}"]) == 1
    assert "does not answer" in capsys.readouterr().err
    with serving(small_tokenizer()) as server:
        assert cli.main(["chat", server.url.replace("http:", "https:")]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said and "Errno" not in said and "directory" not in said
    for odd in ("http://", "http://no such host/", "http://127.0.0.1:99999", "http://[::1", "http://é.invalid"):
        assert cli.main(["chat", odd]) == cli.main(["bench", "serve", odd]) == 2
        assert capsys.readouterr().err.count("is no address of a server") == 2


def test_a_key_that_cannot_be_sent_is_not_repeated(server, capsys, monkeypatch):
    monkeypatch.setenv("RILLE_API_KEY", "secret\n")
    assert cli.main(["chat", server.url]) == 2
    said = capsys.readouterr().err
    assert "RILLE_API_KEY has a character" in said and "secret" not in said


@contextmanager
def answering(models: bytes, chunks: bytes = b"") -> Iterator[str]:
    """Some server: what it says of its models, and how it replies."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.say(chunks)

        def say(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "models",
    [
        b"<html>hello</html>",
        *(b"[]", b"null", b'{"data": null}', b'{"data": "x"}', b'{"data": [{}]}', b'{"data": ["m"]}', b"[" * 5000),
        b'{"data": [{"id": 5}]}',
    ],
)
def test_a_server_of_something_else_is_told_in_one_line(models, capsys):
    with answering(models) as url:
        assert cli.main(["chat", url]) == cli.main(["bench", "serve", url]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("is this the address of a server of OpenAI's API?" in line for line in said)


def delta(text: str) -> str:
    return f'{{"choices": [{{"delta": {text}}}]}}'


def called(text: str) -> str:
    return delta(f'{{"tool_calls": [{text}]}}')


@pytest.mark.parametrize(
    "chunk",
    [
        *("[]", "null", "5", "{", '{"error": "bad \\u001b[2J"}', '{"usage": "x"}', '{"choices": ["x"]}'),
        *map(delta, ('"x"', '{"content": ["a"]}', '{"content": 5}')),
        *map(called, ('"x"', "{}", '{"index": 0, "function": {"arguments": "{}"}}', '{"index": 5, "function": {}}')),
        *map(called, ('{"index": -1, "function": {}}', '{"function": {"name": "f", "arguments": {}}}')),
    ],
)
def test_a_reply_of_another_form_is_told_in_one_line(chunk, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO("hi\n"))
    with answering(b'{"data": [{"id": "m"}]}', f"data: {chunk}\n\n".encode()) as url:
        assert cli.main(["chat", url]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "rille: " in line]
    assert "\x1b" not in line and ("its answer" in line or "bad" in line)


def test_what_other_servers_write_is_read():
    """Nothing is null or is not there; calls that come whole have no number; thinking has another name."""
    chunks: list[dict] = [
        {"error": None, "choices": None, "usage": None},
        {"choices": [{"delta": None, "finish_reason": None}]},
        {"choices": [{"delta": {"reasoning": "Hm.", "content": None, "tool_calls": None}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "double", "arguments": '{"number": 21}'}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "double", "arguments": '{"number":'}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": " 4}"}}]}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": None}},
    ]
    heard = _Heard(False)
    events = [event for chunk in chunks for event in heard.take(chunk)]
    assert events[0] == Reasoning("Hm.") and heard.usage == (0, 3, 0)
    assert [call.arguments for call in heard.reply().calls] == ['{"number": 21}', '{"number": 4}']
