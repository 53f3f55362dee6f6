"""`rille serve`: a checkpoint, an engine, and the HTTP face before it, until somebody says stop.

    checkpoint  ->  Engine  ->  Front  ->  app  ->  uvicorn

SIGINT and SIGTERM end it: what runs is aborted, and its clients are told.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import uvicorn
from fastapi import FastAPI

from rille.model.config import K3Config
from rille.model.locate import find_checkpoint
from rille.serve.api import Limits, create_app
from rille.serve.chat import check_chat_format, read_image_config
from rille.serve.config import ServeConfig
from rille.serve.engine import Engine
from rille.serve.front import Abilities, Front
from rille.serve.patience import PatientProtocol
from rille.text.images import ImageConfig

if TYPE_CHECKING:
    from rille.serve.kv_events import Publisher

KEY_VARIABLE = "RILLE_API_KEY"
MOST_FILES = 1 << 16
GRACE_S = 5  # for streams to end once their requests were aborted


def serve(config: ServeConfig) -> None:
    """Serve until a signal. Raises ValueError or FileNotFoundError for what cannot be served, OSError for a port that
    is taken."""
    place = find_checkpoint(config.checkpoint)
    listener = listen(config.host, config.port)
    allow_connections()
    leave_a_core()
    engine = Engine(place, config=config.engine)
    if engine.tokenizer is None:
        raise ValueError(f"{place} has no tokenizer, so there is no text to serve; add its tokenizer.json")
    check_chat_format(engine.tokenizer)
    abilities = abilities_of(place, engine, config.name or (Path(config.checkpoint).resolve().name,))
    front = Front(engine, engine.tokenizer, abilities, timeout_s=config.timeout_s)
    keys = (*config.api_key, *filter(None, [os.environ.get(KEY_VARIABLE, "")]))
    app = create_app(front, Limits(keys, config.max_body_mib << 20))
    events = publisher(config, engine) if config.kv_events is not None else None
    host, port = listener.getsockname()[:2]
    for line in (f"model: {', '.join(abilities.names)} from {place}", *engine.describe()):
        print(line)
    print(f"key: {'needed' if keys else 'none, anyone who reaches this address is answered'}")
    if events is not None:
        print(f"events: {events.address}, topic {config.kv_events_topic!r}")
    engine.start()
    try:
        engine.warm_up()
        keep_loaded()
        listener.listen()  # whoever comes now waits for the first answer
        print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        run(app, engine, listener)
    finally:
        engine.close()
        if events is not None:
            events.close()


def allow_connections() -> None:
    """Let as many files be open as the system lets a process have: each client is one, and of 1,024, which is often the
    limit where none was asked for, a full queue alone takes all."""
    if find_spec("resource") is None:  # not Unix
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def leave_a_core() -> None:
    """Let products on a CPU have all cores but one, where nothing else is asked for: their threads wait for each
    other, and so for each core that clients or HTTP have. With two threads on two cores `tiny` wrote 320 tokens a
    second over HTTP to 64 clients of the same machine, with one 1,055."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() >= cores > 1:
        torch.set_num_threads(cores - 1)


def keep_loaded() -> None:
    """Take all that is there by now out of the collector's sight: it stays. Else now and then a collection would visit
    it, 0.1 s in which nobody gets a token."""
    gc.collect()
    gc.freeze()


def publisher(config: ServeConfig, engine: Engine) -> Publisher:
    """Tell at the address of the settings what can be resumed. Raises ValueError."""
    if missing := [name for name in ("zmq", "msgspec") if find_spec(name) is None]:
        raise ValueError(f"kv_events needs {', '.join(missing)}, not installed here: pip install 'rille[events]'")
    from rille.serve.kv_events import publish

    assert config.kv_events is not None, "asked only where there is an address"
    return publish(config.kv_events, engine, config.kv_events_topic)


def abilities_of(place: Path, engine: Engine, names: tuple[str, ...]) -> Abilities:
    """What a checkpoint can do."""
    c: K3Config = engine.model.config
    images = None
    if c.vision is not None and c.media_pad_id is not None:
        images = read_image_config(place) or ImageConfig(patch=c.vision.patch_size, merge=c.vision.merge[0])
    return Abilities(
        names=names,
        max_length=engine.longest,
        images=images,
        media_id=c.media_pad_id,
        created=int((place / "config.json").stat().st_mtime),
    )


def listen(host: str, port: int) -> socket.socket:
    """Take the port before the weights are loaded, which may last. Raises OSError with the address."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(kind, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        taken = "; give another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"{host}:{port} cannot be listened on: {error.strerror or error}{taken}") from None
    return listener


class Server(uvicorn.Server):
    """At a signal the engine ends first, and with it all streams: waiting for their last token could take hours."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._engine.close)
        await super().shutdown(sockets)


def run(app: FastAPI, engine: Engine, listener: socket.socket) -> None:
    """Answer until a signal, which then does what it does elsewhere."""
    settings = uvicorn.Config(
        app,
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
    )
    Server(settings, engine).run(sockets=[listener])
