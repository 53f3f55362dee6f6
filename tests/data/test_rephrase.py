"""Against a server on this machine: pieces follow each other, unfaithful ones are asked for again, nothing is lost."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rille.data.command_config import RephraseConfig
from rille.data.endpoint import Endpoint, NoAnswer, Refused
from rille.data.fidelity import measure
from rille.data.rephrase import cut_pieces, rephrase
from rille.data.steps import NoSteps
from rille.data.styles import STYLES
from tests.data.sets import write_jsonl

Reply = Callable[[dict], tuple[int, object]]
PASSAGE = re.compile(r"<passage>\n(.*?)\n</passage>", re.DOTALL)
WRITTEN = re.compile(r"<written>\n(.*?)\n</written>", re.DOTALL)


def said(text: object, reason: str = "stop") -> tuple[int, dict]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def user_of(request: dict) -> str:
    return request["messages"][1]["content"]


def is_judging(request: dict) -> bool:
    return "<rewritten>" in user_of(request)


def faithful(request: dict) -> tuple[int, dict]:
    """A model that turns the words of a passage around: all facts, no copied runs."""
    if is_judging(request):
        return said("SAME")
    found = PASSAGE.search(user_of(request))
    assert found is not None
    return said(" ".join(reversed(found[1].split())))


@contextmanager
def server(reply: Reply) -> Iterator[tuple[str, list[dict]]]:
    """The address of a server, and the requests that it got."""
    requests: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "path": self.path, "key": self.headers["Authorization"]})
            code, content = reply(request)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1", requests
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def document(number: int, paragraphs: int = 3) -> str:
    return "\n\n".join(
        f"Fact {number * 100 + i}: the river of Arlen{number} rose by {i + 3} metres in the year {1800 + number}, "
        f"and the bridge at Morton{i} was closed for a while because the water ran over its stones."
        for i in range(paragraphs)
    )


def config(tmp_path: Path, address: str, texts: list[str], **changes) -> RephraseConfig:
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    settings = {"chunk_bytes": 250, "context_bytes": 120, "parallel": 3, "styles": ("textbook", "plain"), **changes}
    return RephraseConfig(
        source=str(source), out=str(tmp_path / "out.jsonl"), endpoint=address, model="small", **settings
    )


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def test_every_document_in_every_style(tmp_path: Path):
    texts = [document(number) for number in range(5)]
    with server(faithful) as (address, requests):
        outcome = rephrase(config(tmp_path, address, texts), NoSteps())
    lines = lines_of(tmp_path / "out.jsonl")
    assert outcome.written == len(lines) == 10
    assert [(line["source"], line["style"]) for line in lines] == [
        (f"texts.jsonl:{i + 1}", style) for i in range(5) for style in ("textbook", "plain")
    ]
    for line in lines:
        words = texts[int(line["source"].split(":")[1]) - 1].split()
        assert sorted(line["text"].split()) == sorted(words)
        assert line["fidelity"]["numbers"] == 1.0
        assert line["pieces"] == 3
    assert {request["path"] for request in requests} == {"/v1/chat/completions"}
    assert {request["model"] for request in requests} == {"small"}
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_each_piece_sees_what_was_written_before(tmp_path: Path):
    with server(faithful) as (address, requests):
        rephrase(config(tmp_path, address, [document(1, 4)], styles=("dialogue",), parallel=1), NoSteps())
    written = ""
    asked = [user_of(request) for request in requests if not is_judging(request)]
    assert len(asked) == 4
    for place, request in enumerate(asked):
        assert STYLES["dialogue"] in request
        before, piece = WRITTEN.search(request), PASSAGE.search(request)
        assert piece is not None
        assert (before[1] if before else "") == written[-120:]
        assert ("the beginning of a longer" in request) == (place == 0)
        answer = " ".join(reversed(piece[1].split()))
        written = f"{written}\n\n{answer}" if written else answer


def test_unfaithful_pieces_are_asked_for_again_then_given_up(tmp_path: Path):
    def reply(request: dict) -> tuple[int, dict]:
        if is_judging(request):
            return said("DIFFERENT" if "Arlen2" in user_of(request) else "SAME")
        if "Arlen3" in user_of(request):
            return said("Something rose, somewhere, once.")
        if "Arlen4" in user_of(request):
            code, answer = faithful(request)
            return said(answer["choices"][0]["message"]["content"], "length")
        if "Arlen1" in user_of(request) and request["seed"] == 0:
            return said("A first try without any of the facts.")
        return faithful(request)

    with server(reply) as (address, _):
        outcome = rephrase(config(tmp_path, address, [document(i, 1) for i in range(5)], styles=("plain",)), NoSteps())
    assert [line["source"] for line in lines_of(tmp_path / "out.jsonl")] == ["texts.jsonl:1", "texts.jsonl:2"]
    assert outcome.failed == {"judged different": 1, "numbers lost": 1, "cut off by the endpoint": 1}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path):
    texts = [document(number, 1) for number in range(8)]
    count = [0]

    def failing(request: dict) -> tuple[int, object]:
        count[0] += 1
        return faithful(request) if count[0] <= 6 else (401, {"error": "no"})

    with server(failing) as (address, _):
        settings = config(tmp_path, address, texts, parallel=1, judge=False)
        with pytest.raises(ValueError, match="refuses the request: 401"):
            rephrase(settings, NoSteps())
    journal = tmp_path / "out.jsonl.partial"
    with journal.open("ab") as stream:
        stream.write(b'{"key": "cut sho')
    with server(faithful) as (address, requests):
        other = RephraseConfig(**{**vars(settings), "endpoint": address})
        with pytest.raises(ValueError, match="other settings"):
            rephrase(RephraseConfig(**{**vars(other), "temperature": 0.1}), NoSteps())
        outcome = rephrase(other, NoSteps())
    assert (outcome.written, outcome.before, len(requests)) == (16, 6, 10)
    assert len(lines_of(tmp_path / "out.jsonl")) == 16
    with pytest.raises(ValueError, match="exists already"):
        rephrase(other, NoSteps())


def test_a_run_without_a_result_leaves_no_journal(tmp_path: Path):
    with server(faithful) as (address, _):
        right = config(tmp_path, address, [document(0, 1)], parallel=1, judge=False)
        with pytest.raises(ValueError, match="does not exist"):
            rephrase(RephraseConfig(**{**vars(right), "source": str(tmp_path / "absent.jsonl")}), NoSteps())
        assert not (tmp_path / "out.jsonl.partial").exists()
        assert rephrase(right, NoSteps()).written


def ask(address: str, pauses: list[float], timeout: float = 10.0) -> str:
    endpoint = Endpoint(address, "small", "secret", timeout, pauses.append)
    return endpoint.ask("be", "hello", temperature=0.0, max_tokens=5, seed=1).text


def test_a_busy_server_is_asked_again():
    codes, pauses = [429, 503], []
    with server(lambda request: (codes.pop(0), b"busy") if codes else said("ok")) as (address, requests):
        assert ask(address, pauses) == "ok"
    assert pauses == [1.0, 2.0]
    assert {request["key"] for request in requests} == {"Bearer secret"}


def test_servers_that_do_not_help():
    with server(lambda request: (500, b"")) as (address, requests):
        with pytest.raises(NoAnswer, match="after 5 tries: 500"):
            ask(address, [])
        assert len(requests) == 5
    with pytest.raises(NoAnswer, match="gives no answer"):
        ask(address, [])  # nobody listens there any more
    for answer in (b"<html>", {"choices": []}, [1], said(5)[1], said(["x"])[1], b"[" * 100_000):
        with (
            server(lambda request, answer=answer: (200, answer)) as (address, _),
            pytest.raises(Refused, match="no chat"),
        ):
            ask(address, [])


def test_a_text_that_the_server_refuses_is_given_up_and_the_others_go_on(tmp_path: Path):
    def reply(request: dict) -> tuple[int, object]:
        if "Arlen" not in user_of(request):
            return said("yes")
        return (400, {"error": "too long"}) if "Arlen1" in user_of(request) else faithful(request)

    with server(reply) as (address, _):
        outcome = rephrase(config(tmp_path, address, [document(i, 1) for i in range(3)], styles=("plain",)), NoSteps())
    assert (outcome.written, outcome.failed) == (2, {"refused by the endpoint (400)": 1})
    with server(lambda request: (400, {"error": "no such model"})) as (address, _):
        settings = config(tmp_path, address, [document(0)], styles=("plain",))
        (tmp_path / "out.jsonl").unlink()
        with pytest.raises(Refused, match="no such model"):
            rephrase(settings, NoSteps())
        assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", "an empty answer"), (None, "an empty answer"), ("a \ud800", "an answer that is no text")],
)
def test_answers_of_no_use_are_counted(tmp_path: Path, text: str, fault: str):
    with server(lambda request: said(text)) as (address, _):
        outcome = rephrase(config(tmp_path, address, [document(0)], styles=("plain",)), NoSteps())
    assert (outcome.written, outcome.failed) == (0, {fault: 1})


def test_a_server_that_gives_a_byte_now_and_then_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    connection.sendall(b" ")
                    time.sleep(0.02)

        threads = [threading.Thread(target=drip) for _ in range(5)]
        for thread in threads:
            thread.start()
        with pytest.raises(NoAnswer, match="the answer is not whole in time"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", [], timeout=0.2)
        for thread in threads:
            thread.join()


def test_two_runs_do_not_write_to_one_file(tmp_path: Path):
    texts = [document(number, 1) for number in range(2)]
    refused: list[str] = []

    def reply(request: dict) -> tuple[int, dict]:
        if not refused:
            refused.append("")
            with pytest.raises(ValueError, match="another run writes to"):
                rephrase(settings, NoSteps())
        return faithful(request)

    with server(reply) as (address, _):
        settings = config(tmp_path, address, texts, parallel=1)
        assert rephrase(settings, NoSteps()).written == 4
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []


def test_mistakes_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="is no address"):
        config(tmp_path, "localhost:8000", [])
    for changes in ({"most": 0}, {"timeout": float("inf")}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} "):
            config(tmp_path, "http://127.0.0.1:9/v1", [], **changes)
    with pytest.raises(ValueError, match="give each once"):
        rephrase(config(tmp_path, "http://127.0.0.1:9/v1", ["a"], styles=("plain", "plain")), NoSteps())
    with pytest.raises(ValueError, match="unknown styles epic"):
        rephrase(config(tmp_path, "http://127.0.0.1:9/v1", ["a"], styles=("epic",)), NoSteps())


@given(st.text(st.sampled_from("ab .\n\u3002\u00e9🙂"), max_size=200), st.integers(1, 40))
def test_pieces_joined_are_the_text(text: str, most: int):
    pieces = cut_pieces(text, most)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(len(piece.encode()) <= most or len(piece) == 1 for piece in pieces)


def test_measures_by_hand():
    original = "In 1969 the ship Apollo11 landed, and Armstrong stood there. It was 21 July."
    same = measure(original, original)
    assert (same.numbers, same.names, same.invented, same.length, same.copied) == (1, 1, 0, 1, 1)
    assert same.fault() == "copied"
    other = measure(
        original, "A craft, Apollo11, came down in 1969; Armstrong was on 21 July the one who stood on it then."
    )
    assert other.fault() is None
    lost = measure(
        original, "A craft, Apollo11, came down some day; Armstrong was the one who stood on it then, in July."
    )
    assert lost.numbers == pytest.approx(1 / 3)
    assert lost.fault() == "numbers lost"
    invented = measure(
        original, "Apollo11 came down in 1969 with 3 men; Armstrong was on 21 July the one who stood on it."
    )
    assert invented.invented == pytest.approx(1 / 4)
    assert invented.fault() == "numbers invented"
    assert measure(original, "1969 21 Apollo11 Armstrong July").fault() == "too short"
