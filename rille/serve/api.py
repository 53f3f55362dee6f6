"""The HTTP face: OpenAI's and Anthropic's routes, who may use them, how large a body may be, what errors look like. No
torch here.

    body  ->  checked  ->  (in a thread) prompt, submit  ->  JSON, or a stream of events

What takes long runs in a thread, so that one long prompt does not hold up the streams of others. A client that goes
away ends its request in the engine, streaming or not.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, TypeVar
from uuid import uuid4

import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rille.serve import chat_api, completions_api, messages_api, responses_api
from rille.serve.asking import Json
from rille.serve.bodies import JsonRoute
from rille.serve.errors import ApiError, from_refusal, from_validation, from_value_error
from rille.serve.front import Front
from rille.serve.schema import Refused, SamplingParams, Unavailable
from rille.serve.schema import Request as EngineRequest
from rille.serve.sse import event, to_json, with_pings

T = TypeVar("T")

_OPEN = ("/", "/page.js", "/page.css", "/health", "/metrics")  # these need no key
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self'"}


@dataclass(frozen=True)
class Limits:
    """keys: any of them opens the API, none leaves it open; max_body: bytes of a request; patience_s: with which the
    next bytes of a body are waited for."""

    keys: tuple[str, ...] = ()
    max_body: int = 64 << 20
    patience_s: float = 60.0


def create_app(front: Front, limits: Limits | None = None) -> FastAPI:
    """The application, for any ASGI server."""
    app = FastAPI(title="Rille", docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    _add_chat(app, front)
    _add_completions(app, front)
    _add_messages(app, front)
    _add_responses(app, front)
    _add_models(app, front)
    _add_health(app, front)
    _add_page(app)
    app.add_exception_handler(ApiError, _answer_error)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(RequestValidationError, _answer_validation)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(HTTPException, _answer_http)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(RecursionError, _answer_depth)
    app.add_exception_handler(Exception, _answer_fault)
    app.add_middleware(Gate, limits=limits or Limits())
    return app


# --- routes -----------------------------------------------------------------------------------------------------------


def _add_chat(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: chat_api.ChatBody, request: Request) -> Response:
        model = front.check_model(body.model)
        turn = await in_thread(lambda: front.begin(body.ask()))
        if body.stream:
            parts = chat_api.stream(front, turn, model, bool(body.logprobs), body.usage_in)
            return streamed(parts, turn.abort)
        return answer(await unless_gone(request, chat_api.whole(front, turn, model, bool(body.logprobs))))


def _add_completions(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions")
    async def complete(body: completions_api.CompletionBody, request: Request) -> Response:
        model = front.check_model(body.model)
        completions = await in_thread(lambda: body.begin(front))
        if body.stream:
            parts = completions_api.stream(front, completions, model, body.usage_in)
            return streamed(parts, completions.abort)
        return answer(await unless_gone(request, completions_api.whole(front, completions, model)))

    @app.post("/tokenize")
    async def tokenize(body: completions_api.TokenizeBody) -> Response:
        front.check_model(body.model)
        ids = await in_thread(lambda: body.ids(front))
        return answer({"count": len(ids), "max_model_len": front.abilities.max_length, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(body: completions_api.DetokenizeBody) -> Response:
        front.check_model(body.model)
        return answer({"prompt": await in_thread(lambda: front.tokenizer.decode(body.tokens))})


def _add_messages(app: FastAPI, front: Front) -> None:
    @app.post("/v1/messages")
    async def messages(body: messages_api.MessagesBody, request: Request) -> Response:
        model, stops = front.check_model(body.model), tuple(body.stop_sequences or ())
        turn = await in_thread(lambda: front.begin(body.ask()))
        if body.stream:
            return streamed(messages_api.stream(turn, model, stops), turn.abort, anthropic=True)
        return answer(await unless_gone(request, messages_api.whole(turn, model, stops)))

    @app.post("/v1/messages/count_tokens")
    async def count(body: messages_api.CountBody) -> Response:
        front.check_model(body.model)
        return answer(await in_thread(lambda: messages_api.count(front, body.ask())))


def _add_responses(app: FastAPI, front: Front) -> None:
    @app.post("/v1/responses")
    async def responses(body: responses_api.ResponsesBody, request: Request) -> Response:
        model = front.check_model(body.model)
        turn = await in_thread(lambda: front.begin(body.ask()))
        response = responses_api.Response(turn, model, body.echo())
        if body.stream:
            return streamed(responses_api.stream(response), turn.abort)
        return answer(await unless_gone(request, responses_api.whole(response)))


def _add_models(app: FastAPI, front: Front) -> None:
    def entry(name: str) -> Json:
        """As OpenAI's clients read it, and Anthropic's."""
        able, created = front.abilities, front.created_at
        openai = {"id": name, "object": "model", "created": able.created, "owned_by": "rille", "root": able.names[0]}
        return {
            **openai,
            "max_model_len": able.max_length,
            "vocab_size": front.tokenizer.vocab_size,
            "type": "model",
            "display_name": name,
            "created_at": created,
            "modalities": ["text", "image"] if able.images is not None else ["text"],
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = front.abilities.names
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return answer({"object": "list", "data": [entry(name) for name in names], **ends})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return answer(entry(front.check_model(name)))


def _add_health(app: FastAPI, front: Front) -> None:
    probe = EngineRequest(prompt=(0,), params=SamplingParams(max_tokens=1))

    @app.get("/health")
    async def health() -> Response:
        try:
            front.engine.check(probe)
        except Unavailable as error:
            raise from_refusal(error) from None
        except Refused:
            pass  # busy is not ill
        return answer({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(front.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/figures")
    async def figures() -> Response:
        return answer({**asdict(front.engine.stats()), "about": front.engine.describe()})


def _add_page(app: FastAPI) -> None:
    folder = files("rille.serve") / "page"

    def serve(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        async def page() -> Response:
            return Response(folder.joinpath(name).read_bytes(), media_type=kind, headers=_PAGE_HEADERS)

        return page

    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, serve(name, kind), include_in_schema=False)


# --- work and answers -------------------------------------------------------------------------------------------------


async def in_thread(work: Callable[[], T]) -> T:
    """Run what takes long beside the event loop. What the user can mend, or must wait for, becomes an ApiError."""
    try:
        return await anyio.to_thread.run_sync(work)
    except Refused as error:
        raise from_refusal(error) from None
    except ValueError as error:
        raise from_value_error(error) from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of a reply, which ends where the client goes away before."""
    reply = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        raise ApiError(499, "the client has gone")
    finally:
        for task in (reply, gone):
            task.cancel()
        await asyncio.wait({reply, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


def streamed(
    parts: AsyncGenerator[bytes, None], abort: Callable[[], None], anthropic: bool = False
) -> StreamingResponse:
    """A stream of events. What fails on the way ends it with an event of its own, for the status is sent already.

    abort: ends the request in the engine; called at the end in any case, for a stream whose client has gone before it
    began runs no line of `parts`.
    """

    async def safe() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts):
            try:
                async for part in parts:
                    yield part
            except ApiError as error:
                yield event(error.anthropic(), "error") if anthropic else event(error.openai())

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return _Stream(with_pings(safe()), abort, headers)


class _Stream(StreamingResponse):
    def __init__(self, parts: AsyncGenerator[bytes, None], abort: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._abort()


# --- errors -----------------------------------------------------------------------------------------------------------


def _respond(path: str, error: ApiError) -> Response:
    body = error.anthropic() if path.startswith("/v1/messages") else error.openai()
    return answer(body, error.status, error.headers)


async def _answer_error(request: Request, error: ApiError) -> Response:
    return _respond(request.url.path, error)


async def _answer_validation(request: Request, error: RequestValidationError) -> Response:
    return _respond(request.url.path, from_validation(error.errors()))


async def _answer_http(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}"
    response = _respond(request.url.path, ApiError(error.status_code, text))
    response.headers.update(error.headers or {})  # what is allowed instead
    return response


async def _answer_depth(request: Request, error: Exception) -> Response:
    """JSON that is read at one depth may be too deep for what walks through it later: schemas above all."""
    return _respond(request.url.path, ApiError(400, "the request nests too deep, a schema in it perhaps; flatten it"))


async def _answer_fault(request: Request, error: Exception) -> Response:
    """A fault of ours. What it was is in the server's log, where Starlette writes it; a client learns only that."""
    response = _respond(request.url.path, ApiError(500, "the server failed at this request; its log says why"))
    response.headers["x-request-id"] = request.scope["request_name"]  # this answer goes around the gate
    return response


class Gate:
    """Before anything is read: is the key right, is the body small enough. Every answer names its request."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = scope["request_name"] = headers.get("x-request-id") or f"req_{uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode("latin-1"))]
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            inner = await self._bounded(headers, receive)
        except ApiError as error:
            await _respond(scope["path"], error)(scope, receive, named)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server sends no body then
        await self.app({**scope, "method": method}, inner, named)

    def _check_key(self, path: str, headers: dict[str, str]) -> None:
        if not self.limits.keys or path in _OPEN:
            return
        scheme, _, told = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), told.strip() if scheme.lower() == "bearer" else ""]
        if not any(
            hmac.compare_digest(one.encode("latin-1"), key.encode()) for one in given for key in self.limits.keys
        ):
            raise ApiError(401, "no valid API key: give one as Authorization: Bearer KEY", code="invalid_api_key")

    async def _bounded(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Read the body, up to the limit, and hand it on. Raises ApiError 413, 415 and 408."""
        size, parts, limit = 0, [], self.limits.max_body
        if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise ApiError(415, f"the body is encoded as {coding!r:.40}; send it as it is", code="unsupported_encoding")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise self._too_large(length)
        while True:
            message = await self._soon(receive)
            parts.append(message)
            size += len(message.get("body", b""))
            if size > limit:
                raise self._too_large(f"{size:,} or more")
            if message["type"] != "http.request" or not message.get("more_body", False):
                break

        async def again() -> Message:
            return parts.pop(0) if parts else await receive()

        return again

    async def _soon(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self.limits.patience_s):
                return await receive()
        except TimeoutError:
            text = f"nothing more of the body has come for {self.limits.patience_s:g} s, and it is not whole"
            raise ApiError(408, text, code="timeout", closes=True) from None

    def _too_large(self, size: str) -> ApiError:
        text = f"the body has {size} bytes; this server takes at most {self.limits.max_body:,}"
        return ApiError(413, text, code="request_too_large")
