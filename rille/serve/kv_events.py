"""What of past prompts could be resumed, told to routers over ZMQ in the format of vLLM's cache events.

    message  =  [topic, number (8 bytes, big-endian), msgpack([time, [event*], rank])]
    event    =  ["BlockStored", hashes, parent, ids, block size, None, medium]  |  ["BlockRemoved", hashes, medium]

A block is a hash unit, and it is told only while a checkpoint lies at or behind its end: latents alone could not be
resumed, and an indexer that believed so would send prompts to where they must be computed. Every block is known once,
whatever memory holds for it.
Source: vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from time import time
from typing import Any

import msgspec
import zmq

from rille.serve.chain import Chain
from rille.serve.engine import Engine

MEDIUM = "GPU"  # where routers expect what can be resumed at once, whatever the device


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes]
    medium: str | None


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Announcer:
    """Which blocks lie under a live checkpoint; `send` gets the events of each change."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._under: dict[bytes, list[bytes]] = {}  # hash of a checkpoint: its blocks
        self._holders: Counter[bytes] = Counter()  # of a block: checkpoints at or behind its end

    def resumable(self, chain: Chain, position: int) -> None:
        """As `store.Watcher.resumable`."""
        key, unit = chain.at(position), chain.unit
        if key in self._under:
            return
        blocks = [chain.at(end) for end in range(unit, position + 1, unit)]
        new = [place for place, block in enumerate(blocks) if not self._holders[block]]
        self._under[key] = blocks
        self._holders.update(blocks)
        if new:  # a prefix that is known is known from its beginning
            first = new[0]
            ids = chain.ids[first * unit : len(blocks) * unit].tolist()
            parent = blocks[first - 1] if first else None
            self._send(BlockStored(blocks[first:], parent, ids, unit, None, MEDIUM))

    def gone(self, key: bytes) -> None:
        """As `store.Watcher.gone`."""
        blocks = self._under.pop(key, [])
        self._holders.subtract(blocks)
        over = [block for block in blocks if not self._holders[block]]
        for block in over:
            del self._holders[block]
        if over:
            self._send(BlockRemoved(over[::-1], MEDIUM))


class Publisher:
    """A ZMQ socket that publishes. address: to bind to. Raises ValueError for one that cannot be bound."""

    def __init__(self, address: str, topic: str = "") -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._topic, self._numbers = topic.encode(), count()
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ValueError(f"kv_events: {address} cannot be bound: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, event: BlockStored | BlockRemoved) -> None:
        """Publish one event; without a listener, or with one that is too slow, it is lost, as everywhere with ZMQ."""
        payload = msgspec.msgpack.encode(EventBatch(time(), [event]))
        number = next(self._numbers).to_bytes(8, "big")
        self._socket.send_multipart((self._topic, number, payload), zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close(0)


def publish(address: str, engine: Engine, topic: str = "") -> Publisher:
    """Let an engine that has not started tell what it can resume."""
    publisher = Publisher(address, topic)
    engine.scheduler.cache.store.watcher = Announcer(publisher.send)
    return publisher
