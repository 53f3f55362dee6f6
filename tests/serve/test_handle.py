"""What lies between the engine's thread and who reads: nothing is lost, and who is slow gets more at once."""

import asyncio
import threading

import pytest

from rille.serve import handle as handle_module
from rille.serve.front import Abilities, Front, Turn
from rille.serve.handle import Alarm, RequestHandle
from rille.serve.replying import ChatReader, Ended, TextReader
from rille.serve.schema import Finished, TokenOutput, Usage
from rille.text.reply import Content
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import ScriptedEngine


@pytest.fixture(scope="module")
def front():
    tokenizer = small_tokenizer()
    return Front(ScriptedEngine(tokenizer), tokenizer, Abilities(names=("tiny",), max_length=1000))


def end(count: int, index: int = 0) -> Finished:
    return Finished(index, "stop", Usage(3, 0, count))


def read(front: Front, handle: RequestHandle, readers) -> list:
    async def listen():
        return [piece async for piece in Turn(front, handle, readers, 3, 0.0, has_thinking=False).pieces()]

    return asyncio.run(listen())


def test_what_came_at_once_is_one_piece(front):
    handle = RequestHandle("a", 2)
    for number in range(5):
        handle.put([TokenOutput(index, 10 * index + number, None, text=f"{number},") for index in range(2)])
    handle.put([end(5), end(5, index=1)])
    pieces = read(front, handle, [TextReader(), TextReader()])
    assert [type(piece).__name__ for piece in pieces] == ["Piece", "Ended"] * 2
    for index, piece in enumerate(pieces[::2]):
        assert [token.token for token in piece.tokens] == [10 * index + number for number in range(5)]
        assert piece.index == index and "".join(event.text for event in piece.events) == "0,1,2,3,4,"


def test_a_piece_ends_where_a_stop_string_does(front):
    ids = reply_ids(front.tokenizer, thinking=False, content="one STOP and much more")
    handle = RequestHandle("b", 1)
    handle.put([*(TokenOutput(0, token, None) for token in ids), end(len(ids))])
    reader = ChatReader(front.tokenizer, "response", drop_calls=True, stops=["STOP"])
    piece, last = read(front, handle, [reader])
    assert isinstance(last, Ended) and last.matched == "STOP"
    assert "".join(event.text for event in piece.events) == "one "
    assert last.usage.completion_tokens == len(piece.tokens) < len(ids)
    assert ("b", 0) in front.engine.ended


def test_a_stop_string_counts_from_where_it_is_complete(front):
    """It may have begun before min_tokens, with which those of a channel count too."""
    ids = reply_ids(front.tokenizer, thinking=False, content="one STOP two STOP three")
    whole, ends = [front.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)], []
    for count in (1, 2):
        ends.append(next(n for n, text in enumerate(whole) if text.count("STOP") == count))
    assert front.tokenizer.decode(ids[: ends[0] - 1]).endswith(("S", "ST", "STO")), "it stands in several tokens"
    for least in range(len(ids) + 1):
        reader = ChatReader(front.tokenizer, "response", drop_calls=True, stops=["STOP"], min_tokens=least)
        events = [event for token in ids for event in reader.take(TokenOutput(0, token, None))]
        text = "".join(event.text for event in [*events, *reader.finish(end(len(ids)))] if isinstance(event, Content))
        want = "one " if least <= ends[0] else "one STOP two " if least <= ends[1] else "one STOP two STOP three"
        assert (text, reader.is_stopped) == (want, least <= ends[1])


def test_nothing_is_lost_between_threads():
    """Many readers of one loop, all told of by one call into it."""
    handles = [RequestHandle(str(number), 1) for number in range(50)]

    def write():
        for token in range(200):
            for handle in handles:
                handle.put([TokenOutput(0, token, None)])
        for handle in handles:
            handle.put([end(200)])

    async def listen(handle):
        return [output async for output in handle]

    async def all_of_them():
        tasks = [asyncio.ensure_future(listen(handle)) for handle in handles]
        writer = threading.Thread(target=write)
        writer.start()
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    for outputs in asyncio.run(all_of_them()):
        assert [output.token for output in outputs[:-1]] == list(range(200)) and isinstance(outputs[-1], Finished)


class Loop:
    """A loop whose calls somebody else makes. later: seconds of each call that has to wait."""

    def __init__(self):
        self.calls, self.later = [], []

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, call, *args) -> None:
        self.calls.append((call, args))

    def call_later(self, seconds: float, call, *args) -> None:
        self.later.append(seconds)
        self.calls.append((call, args))

    def run(self) -> None:
        call, args = self.calls.pop(0)
        call(*args)


class Reader:
    def __init__(self):
        self.rings = 0

    def set(self) -> None:
        self.rings += 1


def test_after_a_ring_the_loop_rests_longer_than_it_worked(monkeypatch):
    """Readers who came meanwhile are all woken at once; who works little waits for nothing, who works long not long."""
    clock = {"now": 100.0, "work": 7.0}
    monkeypatch.setattr(handle_module, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(handle_module, "thread_time", lambda: clock["work"])
    alarm, loop, readers = Alarm(), Loop(), [Reader() for _ in range(3)]

    def pass_time(seconds: float, work: float) -> None:
        clock["now"] += seconds
        clock["work"] += work

    for seconds, work, left in ((0.001, 0.0001, None), (0.004, 0.004, 0.020), (0.5, 0.1, None), (0.03, 0.03, 0.02)):
        pass_time(seconds, work)
        for reader in readers:
            alarm.wake(loop, reader)
        assert len(loop.calls) == 1, "one call into the loop for all of them"
        loop.run()
        if left is not None:
            assert loop.later == [pytest.approx(left)] and not any(reader.rings for reader in readers)
            alarm.wake(loop, readers[0])  # somebody has more to read meanwhile
            assert len(loop.calls) == 1
            pass_time(left, 0.0)
            loop.run()
            readers[0].rings -= 1
        assert [reader.rings for reader in readers] == [1, 1, 1] and not loop.calls
        loop.later.clear()
        for reader in readers:
            reader.rings = 0


def test_first_tokens_wait_for_no_rest(monkeypatch):
    """The loop has worked for long, on requests as they came: who has read nothing yet is woken all the same, others
    when the rest is over."""
    clock = {"work": 0.0}
    monkeypatch.setattr(handle_module, "thread_time", lambda: clock["work"])
    monkeypatch.setattr(handle_module, "LONGEST_PAUSE_S", 10.0)

    async def first_of(handle, batches):
        return [one.token for one in await asyncio.wait_for(anext(batches), 5)]

    async def turn():
        handle = RequestHandle("c", 1)
        batches = handle.batches()
        reading = asyncio.ensure_future(first_of(handle, batches))
        await asyncio.sleep(0.01)
        clock["work"] += 1.0  # a rest of six seconds from the last ring on
        handle.put([TokenOutput(0, 5, None)])
        assert await reading == [5]
        reading = asyncio.ensure_future(first_of(handle, batches))
        await asyncio.sleep(0.01)
        handle.put([TokenOutput(0, 6, None)])
        await asyncio.sleep(0.01)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait({reading})

    asyncio.run(turn())
