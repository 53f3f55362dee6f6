"""A server on a port of this machine, with an engine that says what a script says."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from rille.serve.api import Limits, create_app
from rille.serve.front import Abilities, Front
from rille.serve.grammar import Vocabulary
from rille.serve.handle import RequestHandle
from rille.serve.patience import PatientProtocol
from rille.serve.schema import (
    EngineStats,
    Finished,
    FinishReason,
    Output,
    Refused,
    Request,
    TokenOutput,
    Usage,
)
from rille.serve.stopping import StopStrings
from rille.text.tokenizer import TrainedTokenizer
from rille.text.vocabulary import TextStream

MAX_LENGTH = 4000


@dataclass
class Script:
    """What one request is answered with: the ids of each choice, then why it ends. gap_s: between two tokens; refuse:
    raised instead; hold: wait for `abort` after the last token; text:
    outputs carry text."""

    choices: Sequence[Sequence[int]]
    reason: FinishReason | None = None  # None: length where max_tokens cuts it, else stop
    cached: int = 0
    error: str | None = None
    gap_s: float = 0.0
    refuse: Exception | None = None
    hold: bool = False
    text: bool = True
    is_refused: bool = False


@dataclass
class ScriptedEngine:
    """As `ServingEngine`. requests: what was submitted; aborted: ids; ended: single choices. is_checking: a reply that
    its grammar does not allow never ends."""

    tokenizer: TrainedTokenizer
    scripts: list[Script] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    figures: EngineStats = field(default_factory=EngineStats)
    down: Exception | None = None
    is_checking: bool = True

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(self.tokenizer)

    def check(self, request: Request) -> None:
        if self.down is not None:
            raise self.down

    def submit(self, request: Request) -> RequestHandle:
        self.check(request)
        script = self.scripts.pop(0)
        if script.refuse is not None:
            raise script.refuse
        self.requests.append(request)
        handle = RequestHandle(f"request-{len(self.requests)}", request.params.n)
        if request.params.grammar is not None:
            self.vocabulary.matcher(request.params.grammar, request.params.grammar_prefix)
        threading.Thread(target=self._say, args=(handle, request, script), daemon=True).start()
        return handle

    def _say(self, handle: RequestHandle, request: Request, script: Script) -> None:
        for index in range(request.params.n):
            ids = list(script.choices[index % len(script.choices)])
            usage = Usage(len(request.prompt), script.cached, len(ids))
            for outputs in self._outputs(index, ids, request, script):
                if handle.id in self.aborted:
                    handle.put([Finished(i, "abort", usage) for i in range(index, request.params.n)])
                    return
                if (handle.id, index) in self.ended:
                    handle.put([Finished(index, "abort", usage)])
                    break
                handle.put(outputs)
                time.sleep(script.gap_s)

    def _outputs(self, index: int, ids: list[int], request: Request, script: Script) -> Iterator[list[Output]]:
        params, stream, strings = request.params, TextStream(self.tokenizer), StopStrings(request.params.stop)
        matcher = None
        if params.grammar is not None and self.is_checking:
            matcher = self.vocabulary.matcher(params.grammar, params.grammar_prefix)
        reason, matched, written = script.reason or "stop", None, 0
        for token in ids:
            if matcher is not None and not matcher.is_over:
                matcher.accept(token)
            text, matched = "", None
            if script.text and token not in self.tokenizer.stop_ids:
                text, matched = strings.feed(stream.feed(token) if token in self.tokenizer else "\ufffd")
            beyond = self.tokenizer.vocab_size + 1  # a word that only the model has
            top = ((token, -0.5), (5, -2.5), (beyond, -3.5))[: params.top_logprobs]
            written += 1
            yield [TokenOutput(index, token, -0.5 if params.logprobs else None, top, 0, text)]
            if matched is not None:
                break
            if written == params.max_tokens and token not in self.tokenizer.stop_ids:
                reason = "length"
                break
        if script.hold and request.deadline_s is not None:
            time.sleep(request.deadline_s)
            reason = "abort"
        while script.hold and reason != "abort":  # until `abort` ends it
            time.sleep(0.005)
            yield []
        usage = Usage(len(request.prompt), script.cached, written)
        if params.grammar is not None and self.is_checking and reason == "stop" and matched is None:
            assert matcher is not None and matcher.is_over, "the script ends where the grammar does not"
        yield [Finished(index, reason, usage, matched, script.error, strings.finish(), script.is_refused)]

    def abort(self, id: str, index: int | None = None) -> None:
        if index is None:
            self.aborted.append(id)
        else:
            self.ended.append((id, index))

    def stats(self) -> EngineStats:
        return self.figures

    def describe(self) -> list[str]:
        return ["pages: 10 of 64 tokens", "least cacheable length: 64 tokens"]

    def start(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Served:
    """A running server. `say`: the next replies of its engine."""

    url: str
    engine: ScriptedEngine
    front: Front

    def say(self, *choices: Sequence[int], **script: Any) -> None:
        self.engine.scripts.append(Script(choices, **script))

    @property
    def request(self) -> Request:
        """The latest one."""
        return self.engine.requests[-1]

    def prompt(self) -> str:
        """What the model was given to read last, control tokens by name."""
        return self.engine.tokenizer.decode(self.request.prompt)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """(status, body as JSON, headers); a body of bytes goes as it is."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request("POST", path, sent, {"Content-Type": "application/json", **names})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text), {key.lower(): value for key, value in response.getheaders()}

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("GET", path, headers={key.replace("_", "-"): value for key, value in headers.items()})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, text, {key.lower(): value for key, value in response.getheaders()}


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an application on a free port, in a thread."""
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, http=PatientProtocol, log_level="critical", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextmanager
def serving(
    tokenizer: TrainedTokenizer, limits: Limits | None = None, timeout_s: float | None = None, **abilities: Any
) -> Iterator[Served]:
    """A server of the model `tiny`, which is also called `other`."""
    engine = ScriptedEngine(tokenizer)
    able = Abilities(names=("tiny", "other"), max_length=MAX_LENGTH, created=1_700_000_000, **abilities)
    front = Front(engine, tokenizer, able, timeout_s=timeout_s)
    with listening(create_app(front, limits)) as url:
        yield Served(url, engine, front)


def until(true: Any, seconds: float = 10) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def refused(error: Refused) -> Script:
    return Script([], refuse=error)
