"""`rille chat`: a conversation in the terminal, or with lines from a pipe. No torch here.

    terminal    everything on the screen: thinking dimmed, tool calls with ->, results with <-
    pipe        each line is a message; answers on standard output, the rest on standard error; the first error ends it

What is said, remembered and carried out is in `rille.serve.dialogue`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches

from rille.serve.config import ChatConfig
from rille.serve.dialogue import Dialogue, Finished, full
from rille.serve.remote import RemoteDialogue, is_url
from rille.serve.screen import Screen
from rille.serve.tools import Toolbox, load_tools
from rille.text.chat import EFFORTS


def chat(config: ChatConfig) -> None:
    """Talk until the input ends. Raises ValueError or FileNotFoundError for unfit settings, OSError where a server does
    not answer."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # one odd byte or character must not end a conversation
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(interactive)
    toolbox = load_tools(config.tools) if config.tools else None
    conversation, about = open_dialogue(config, toolbox)
    terminal = Terminal(conversation, screen)
    if interactive:
        screen.note(about)
        tools = f"tools: {', '.join(toolbox.tools)}. " if toolbox else ""
        screen.note(f"{tools}/help lists commands, Ctrl-C stops a reply, Ctrl-D leaves")
    for path in config.image:
        terminal.image(path)
    terminal.run(interactive)


def open_dialogue(config: ChatConfig, toolbox: Toolbox | None) -> tuple[Dialogue, str]:
    """A conversation with a checkpoint or with a server, and a line about it."""
    if is_url(config.checkpoint):
        remote = RemoteDialogue(config, toolbox)
        return remote, f"{config.checkpoint}: {remote.model}, at most {remote.longest:,} tokens"
    from rille.serve.chat import open_conversation

    return open_conversation(config, toolbox)


class Terminal:
    """Lines in, events out."""

    def __init__(self, conversation: Dialogue, screen: Screen):
        self.conversation, self.screen = conversation, screen
        self.is_open = True

    def run(self, interactive: bool) -> None:
        """Take lines until the input ends or `/quit`. Raises ValueError or OSError for a fault in lines from a pipe."""
        if not interactive:
            for line in sys.stdin:
                if self.is_open and line.strip():
                    self.take(line.rstrip("\r\n"))
            return
        import readline  # gives `input` a line editor and a history

        readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one message, however many lines
        while self.is_open:
            try:
                self.ask()
            except KeyboardInterrupt:  # a second one, before the first was answered
                continue

    def ask(self) -> None:
        """One line from the terminal; what is wrong with it is said, and the conversation goes on."""
        try:
            if (line := input("> ")).strip():
                self.take(line)
        except EOFError:
            self.screen.note("")
            self.is_open = False
        except KeyboardInterrupt:
            self.screen.note("\nCtrl-D or /quit leaves")
        except ValueError as error:
            self.screen.error(str(error))
        except OSError as error:
            self.screen.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    def take(self, line: str) -> None:
        """One line: a command, or a message (one that begins with / is typed with //)."""
        if line.startswith("/") and not line.startswith("//"):
            self.obey(line)
        else:
            self.say(line.removeprefix("/") if line.startswith("//") else line)

    def say(self, text: str) -> None:
        try:
            with closing(self.conversation.say(text)) as events:
                for event in events:
                    self.screen.show(event)
                    if isinstance(event, Finished) and event.reason == "full":
                        self.screen.note(f"the conversation is full; {full(self.conversation.longest)}")
        except KeyboardInterrupt:
            if not self.screen.interactive:
                raise
            self.screen.break_off()

    def obey(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            hint = f"; did you mean /{near[0]}?" if near else ";"
            raise ValueError(f"unknown command /{name}{hint} /help lists all, and // begins a message with a slash")
        command, argument = COMMANDS[name], argument.strip()
        if bool(argument) != bool(command.argument) and not command.may_be_bare:
            raise ValueError(f"usage: /{name} {command.argument}".rstrip())
        command.run(self, argument)

    # --- commands ---

    def help(self, _: str) -> None:
        width = max(len(f"/{name} {command.argument}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            self.screen.note(f"{f'/{name} {command.argument}':<{width}}  {command.line}")
        self.screen.note("Ctrl-C stops a reply, Ctrl-D leaves. A message that begins with a slash is typed with two.")

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.screen.note("a new conversation" + (", same system message" if self.conversation.system else ""))

    def save(self, path: str) -> None:
        self.conversation.save(path)
        self.screen.note(f"{len(self.conversation.history)} messages saved in {path}")

    def load(self, path: str) -> None:
        self.conversation.load(path)
        self.screen.replay(self.conversation.history)

    def effort(self, effort: str) -> None:
        if effort not in EFFORTS:
            raise ValueError(f"effort {effort!r} is not one of {', '.join(EFFORTS)}")
        self.conversation.config = replace(self.conversation.config, effort=effort)
        self.screen.note(f"effort: {effort}")

    def thinking(self, switch: str) -> None:
        if switch not in ("on", "off"):
            raise ValueError(f"thinking {switch!r} is not one of on, off")
        self.conversation.config = replace(self.conversation.config, thinking=switch == "on")
        self.screen.note(f"thinking: {switch}")

    def image(self, path: str) -> None:
        picture = self.conversation.attach(path)
        width, height = picture.sizes[0]
        self.screen.note(f"{path}: {width} x {height}, {picture.num_tokens[0]} tokens; goes with the next message")

    def system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == '""' else text
        self.screen.note(f"system: {self.conversation.system or '(none)'}")

    def quit(self, _: str) -> None:
        self.is_open = False


@dataclass(frozen=True)
class Command:
    run: Callable[[Terminal, str], None]
    line: str
    argument: str = ""
    may_be_bare: bool = False


COMMANDS = {
    "help": Command(Terminal.help, "this list"),
    "reset": Command(Terminal.reset, "begin a new conversation"),
    "save": Command(Terminal.save, "write the conversation, as JSON", "FILE"),
    "load": Command(Terminal.load, "go on with a conversation that was saved", "FILE"),
    "effort": Command(Terminal.effort, "how much to think", "|".join(EFFORTS)),
    "thinking": Command(Terminal.thinking, "think before the answer, or not", "on|off"),
    "image": Command(Terminal.image, "a picture for the next message", "PATH"),
    "system": Command(Terminal.system, 'the system message; without a text it is shown, "" removes it', "TEXT", True),
    "quit": Command(Terminal.quit, "leave (or Ctrl-D)"),
}
