"""What goes wrong with a request, as the status and the body that clients of each API expect. No torch here.

A message names the value, the limit and what to do; it never holds a traceback, nor anything of the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rille.serve.schema import QueueFull, Refused, TooLarge, Unavailable

_OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 500: "api_error"}
_NAMED = re.compile(
    r"(messages|tools|stop|n|[a-z]+(?:_[a-z]+)+|temperature|prompt|seed|logprobs|text\.format|conversation|input"
    r"|instructions|include|system|thinking)"
    r"\b"
)
_CALLED = {"stop_ids": "stop_token_ids"}  # in bodies; the others have the same name there

_FORM = re.compile(r"str|int|bool|(list|dict)\[.*\]")  # what stands in the place of a fault for one form of several

LONGEST_MESSAGE = 1000


class ApiError(Exception):
    """A request that ends with `status`. code, param: as OpenAI's error object has them; retry_after_s: when to ask
    again; closes: nothing sensible can follow on this connection; details: what a client of Anthropic's goes by."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(_readable(message))
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
        self.closes, self.details = closes, details

    @property
    def headers(self) -> dict[str, str]:
        wait = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.closes:
            return {**wait, "Connection": "close"}
        # Clients ask again after a 408 by themselves, and what took too long once would again, three times in all.
        return {**wait, **({"x-should-retry": "false"} if self.status == 408 else {})}

    def openai(self) -> dict[str, Any]:
        """The body of the OpenAI APIs."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body of the Anthropic API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": str(self), **details}}


def _readable(message: str) -> str:
    """One line, and not all of what somebody sent."""
    line = " ".join(message.split())
    cut = len(line) - LONGEST_MESSAGE
    half = LONGEST_MESSAGE // 2
    return line if cut <= 0 else f"{line[:half]}... ({cut:,} characters left out) ...{line[-half:]}"


def from_refusal(error: Refused) -> ApiError:
    """What the engine does not take."""
    codes = {TooLarge: "context_length_exceeded", QueueFull: "rate_limit_exceeded", Unavailable: "unavailable"}
    wait = error.retry_after_s
    if error.status in (429, 503) and wait is None:
        wait = 1.0
    return ApiError(error.status, str(error), code=codes.get(type(error)), retry_after_s=wait)


def from_value_error(error: ValueError) -> ApiError:
    """What the user can mend. The parameter is the first word of the message, where that names one."""
    text = str(error)
    if (named := _NAMED.match(text)) is None:
        return ApiError(400, text, code="invalid_value")
    name = _CALLED.get(named[1], named[1])
    return ApiError(400, name + text[named.end() :], code="invalid_value", param=name)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A body that has not the form that it must have: the first fault, with the place."""
    first = errors[0]
    place = [str(step) for step in first.get("loc", ()) if step != "body"]
    if first.get("type") == "json_invalid":
        return ApiError(400, f"the body cannot be read as JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first.get("type") == "string_unicode" and not place:
        return ApiError(400, "a parameter's name has a lone surrogate, which is no character")
    if not place:
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    forms = [step for step in place if _FORM.fullmatch(step)]
    place = place[: place.index(forms[0])] if forms else place
    name = place[0] + "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in place[1:])
    if forms:
        text = f"{name}: this is none of {', '.join(_forms(errors, len(place)))}"
        return ApiError(400, text, code="invalid_type", param=name)
    if first.get("type") == "extra_forbidden":
        return ApiError(400, f"{name}: this server has no such parameter", code="unknown_parameter", param=name)
    if first.get("type") == "missing":
        return ApiError(400, f"{name}: this parameter is required", code="missing_required_parameter", param=name)
    return ApiError(400, f"{name}: {first['msg']}", code="invalid_type", param=name)


def _forms(errors: Sequence[Mapping[str, Any]], depth: int) -> list[str]:
    """The forms that a value may have, each of which has failed."""
    places = [[str(step) for step in error.get("loc", ()) if step != "body"] for error in errors]
    return list(dict.fromkeys(place[depth] for place in places if len(place) > depth and _FORM.fullmatch(place[depth])))
