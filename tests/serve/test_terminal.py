"""The chat as a person or a script meets it: commands, styles, what goes to which stream; once as a process."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

import rille
from rille import cli
from rille.serve.chat import Conversation
from rille.serve.config import ChatConfig
from rille.serve.remote import is_url
from rille.serve.screen import Screen
from rille.serve.terminal import COMMANDS, Terminal
from rille.serve.tools import Toolbox, declare
from tests.serve.scripted import Scripted, reply_ids, small_tokenizer
from tests.serve.test_chat import CALL, double

CONFIG = ChatConfig(checkpoint="none", temperature=0)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def terminal(tokenizer, *replies: dict, interactive: bool = False, config: ChatConfig = CONFIG) -> Terminal:
    model = Scripted(tokenizer, [reply_ids(tokenizer, **reply) for reply in replies])
    toolbox = Toolbox({"double": declare(double)})
    return Terminal(Conversation(model.as_k3, tokenizer, config, toolbox), Screen(interactive))


def test_answers_go_to_one_stream_and_the_rest_to_the_other(tokenizer, capsys):
    talk = terminal(tokenizer, {"reasoning_content": "Twice it is.", "tool_calls": [CALL]}, {"content": "It is\n42."})
    talk.take("//twice 21?")
    assert talk.conversation.messages[0]["content"] == "/twice 21?"
    out, err = capsys.readouterr()
    assert out == "It is\n42.\n"
    assert err == 'Twice it is.\n-> double({"number": 21})\n<- 42\n'


def test_on_the_screen_all_is_in_order(tokenizer, capsys):
    talk = terminal(tokenizer, {"reasoning_content": "Hm.", "content": "Yes \x1b[31m[bold]"}, interactive=True)
    talk.take("well?")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == ["Hm.", "Yes ␛[31m[bold]"]
    assert lines[2].startswith("[") and "tokens/s;" in lines[2] and not err


def test_limits_and_faults_are_said(tokenizer, capsys):
    talk = terminal(tokenizer, {"content": "one two three"}, config=replace(CONFIG, max_new_tokens=4))
    talk.take("count")
    assert capsys.readouterr().err.endswith("stopped after 4 tokens (--max-new-tokens)\n")
    talk = terminal(tokenizer)
    talk.conversation._model.replies = [tokenizer.encode("what") + [tokenizer.eos_id]]  # as a pretrained model does
    talk.take("hi")
    err = capsys.readouterr().err
    assert "broke the chat format (3): special token <|end_of_text|>" in err and "only trained on plain text" in err


def test_commands(tokenizer, tmp_path, capsys):
    talk = terminal(tokenizer, {"content": "ok"}, {"content": "fine"})
    for line in ("hi", "/effort low", "/thinking off", "/thinking on", "/system Be brief.", "/system", "/help"):
        talk.take(line)
    assert talk.conversation.config == replace(CONFIG, effort="low")
    err = capsys.readouterr().err
    assert err.count("system: Be brief.") == 2 and all(f"/{name}" in err for name in COMMANDS)
    talk.take(f"/save {tmp_path / 'a talk.json'}")
    talk.take("/reset")
    assert talk.conversation.messages == []
    talk.take(f"/load {tmp_path / 'a talk.json'}")
    assert talk.conversation.messages[1]["content"] == "ok"
    assert "3 messages\n> hi\nok\n" in capsys.readouterr().err
    talk.take('/system ""')
    assert talk.conversation.system == ""
    talk.take("/quit")
    assert not talk.is_open


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/imagine a.png", "unknown command /imagine; did you mean /image? /help lists all"),
        ("/save", "usage: /save FILE"),
        ("/quit now", "usage: /quit"),
        ("/effort huge", "effort 'huge' is not one of low, high, max"),
        ("/thinking maybe", "thinking 'maybe' is not one of on, off"),
        ("/load absent.json", "absent.json is no file"),
        ("/image absent.png", "absent.png"),
    ],
)
def test_mistakes(tokenizer, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        terminal(tokenizer).take(line)


def test_the_page_is_true():
    page = (Path(__file__).resolve().parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `/(\w+)", page, re.MULTILINE)) == set(COMMANDS)
    lines = re.findall(r"^[^`\n]*rille chat ([^`\n]+?)(?: 2>.*)?$", page, re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        place = tyro.cli(ChatConfig, args=shlex.split(line)).checkpoint
        assert place == "runs/first" or is_url(place)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoint") / "tiny"
    config = rille.preset("tiny").replace(vocab_size=400, num_layers=4, mla_layers=(3,))
    rille.save_model(rille.new_model(config), place, tokenizer=tokenizer)
    return place


def command(checkpoint, *more: str) -> list[str]:
    return [sys.executable, "-m", "rille.cli", "chat", str(checkpoint), "--max-new-tokens", "5", *more]


def test_lines_from_a_pipe(checkpoint):
    run = subprocess.run(
        command(checkpoint, "--no-thinking"),
        input="hello\n\n/effort low\nagain\n/nonsense\n",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.count("stopped after 5 tokens") == 2 and "unknown command /nonsense" in run.stderr
    assert run.stdout and "\x1b" not in run.stdout + run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent does not exist"),
        (["localhost:8000/v1"], "if it is the address of a server, give http://localhost:8000/v1"),
        (["CHECKPOINT", "--tools", "absent.py"], "absent.py is no Python file"),
        (["CHECKPOINT", "--top-p", "0"], "top_p is 0.0"),
        (["CHECKPOINT", "--max-rounds", "0"], "max_rounds 0; both must be at least 1"),
        (["CHECKPOINT", "--image", "a.png"], "a.png"),
    ],
)
def test_settings_that_cannot_be(checkpoint, arguments, message, capsys):
    words = [str(checkpoint) if word == "CHECKPOINT" else word for word in arguments]
    try:
        code = cli.main(["chat", *words])
    except SystemExit as end:  # tyro's way, where a settings class refuses
        code = end.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_at_a_terminal(checkpoint):
    """A prompt, a reply, Ctrl-C at the prompt, Ctrl-D."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(checkpoint), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    seen = wait_for(ours, b"> ")
    assert b"/help lists commands" in seen
    os.write(ours, b"hello\n")
    assert b"tokens/s" in wait_for(ours, b"> ", after=b"read]")
    os.write(ours, b"/effort huge\n")
    assert b"not one of low" in wait_for(ours, b"> ", after=b"max")
    os.write(ours, b"/save absent/talk.json\n")
    assert b"absent/talk.json: No such file or directory" in wait_for(ours, b"> ", after=b"directory")
    for _ in range(3):  # however fast they come, the conversation is still there; each may cut off the other's answer
        os.killpg(process.pid, signal.SIGINT)
    while select.select([ours], [], [], 2)[0]:  # an interrupt that comes late throws away what was typed before it
        os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(ours, b"> ", after=b"leaves")
    os.write(ours, b"still there?\n")
    assert b"tokens/s" in wait_for(ours, b"> ", after=b"read]")
    os.write(ours, b"\x04")
    assert process.wait(timeout=30) == 0
    os.close(ours)


def wait_for(terminal: int, what: bytes, after: bytes = b"") -> bytes:
    """Read until `what` comes, behind `after`."""
    seen, deadline = b"", time.monotonic() + 180
    while what not in seen.partition(after)[2] if after else what not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096)
    return seen
