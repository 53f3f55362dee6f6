"""A conversation to be continued, whatever API it came by, and what the APIs have in common. No torch here.

body of an API  ->  Ask  ->  prompt, grammar, sampling  ->  engine
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rille.serve.schema import MAX_TOP_LOGPROBS
from rille.text.chat import EFFORTS

Json = dict[str, Any]
UsageIn = Literal["none", "last", "every"]

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
Limit = Annotated[int, Field(ge=1)]  # of tokens; here, since below it has one name whatever a body calls it

# How the scales of other APIs fall on the three efforts that the model knows; "none" is no thinking.
_EFFORTS = {"minimal": "low", "medium": "high", "xhigh": "max", **{effort: effort for effort in EFFORTS}}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")
_MESSAGE = re.compile(r"messages\[([0-9]+)\]")
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """messages, tools, response_format: in the OpenAI form. tool_name: the one tool that must be called. stop: ends the
    answer, not the thinking. sampling: fields of `SamplingParams`; max_tokens None: as long as there is room. places:
    where each message stands in the body, if that is not `messages` itself; words: what other things are called there,
    by what a fault calls them."""

    messages: Sequence[Json]
    tools: Sequence[Json] | None = None
    thinking: bool = True
    effort: str | None = "max"
    tool_choice: str | None = None
    tool_name: str | None = None
    parallel: bool = True
    response_format: Json | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    places: Sequence[str] = ()
    words: Mapping[str, str] = field(default_factory=dict)

    def in_its_words(self, fault: str) -> str:
        """A fault of the conversation as one of what the client has sent."""
        if self.places and (found := _MESSAGE.match(fault)):
            return f"{self.places[int(found[1])]}{fault[found.end() :]}"
        ours = next((ours for ours in self.words if fault.startswith(ours)), "")
        return self.words.get(ours, "") + fault[len(ours) :]


class Body(BaseModel):
    """A body is strict: an unknown parameter is refused, a text is no number, and no number is infinite. Null is as if
    it were not there, known or not: clients send it for what nobody set."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {key: value for key, value in given.items() if value is not None or key in needed}

    def given(self, *names: str) -> Json:
        """Those of the fields that have a value."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # we never pad


class Unheeded(Body):
    """Parameters of OpenAI's APIs that are taken and change nothing here: they say who asks, and where elsewhere a
    cache or a bill would be kept."""

    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Json | None = None


class SamplingBody(Unheeded):
    """Parameters that `/v1/chat/completions` and `/v1/completions` share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self) -> Json:
        """Fields of `SamplingParams`, those that were given. Raises ValueError."""
        names = (
            "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed n ignore_eos "
            "min_tokens"
        )
        given = self.given(*names.split())
        if self.logit_bias:
            given["logit_bias"] = read_bias(self.logit_bias)
        if self.stop_token_ids:
            given["stop_ids"] = tuple(self.stop_token_ids)
        options = self.stream_options
        if options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true only")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options: continuous_usage_stats goes with include_usage: true only")
        return given

    @property
    def usage_in(self) -> UsageIn:
        """Which chunks of a stream say how many tokens there were."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "every" if options.continuous_usage_stats else "last"


def read_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Token ids come as texts, for JSON has no other keys. Raises ValueError."""
    wrong = [key for key in bias if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        raise ValueError(f"logit_bias has the key {wrong[0]!r:.80}; keys must be token ids")
    return {int(key): value for key, value in bias.items()}


def read_stops(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Raises ValueError for empty, too long or too many stop strings."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_LENGTH for text in stops):
        raise ValueError(
            f"{name} has {len(stops)} texts of {sorted({len(text) for text in stops})} characters; it may have "
            f"{MAX_STOPS}, each of 1 to {MAX_STOP_LENGTH:,}"
        )
    return stops


def read_top_logprobs(count: int, name: str = "top_logprobs") -> int:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{name} is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}")
    return count


def read_effort(effort: str, name: str = "reasoning_effort") -> tuple[bool, str | None]:
    """(thinking, effort) of an effort as clients name it. Raises ValueError."""
    if effort == "none":
        return False, None
    if effort not in _EFFORTS:
        raise ValueError(f"{name} {effort!r} is not one of none, {', '.join(_EFFORTS)}")
    return True, _EFFORTS[effort]


def check_tools(messages: Sequence[Json], tools: Sequence[Any] | None) -> None:
    """Names of tools and of calls' results, beyond what rendering checks. Raises ValueError."""
    for i, message in enumerate(messages):
        if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise ValueError(f"messages[{i}] is a tool's result without tool_call_id; give the id of its call")
        if message.get("role") == "system" and message.get("tools") is not None:
            _check_tool_names(message["tools"], f"messages[{i}].tools")
    if tools is not None:
        _check_tool_names(tools, "tools")


def _check_tool_names(tools: Any, where: str) -> None:
    if not isinstance(tools, list):
        raise ValueError(f"{where} must be a list of tools, not {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and not _TOOL_NAME.fullmatch(name):
            raise ValueError(
                f"{where}[{i}] has the name {name[:80]!r} of {len(name)} characters; a name is 1 to 256 letters, "
                "digits, _ or -, and begins with a letter or _"
            )


def check_response_format(given: Json | None) -> None:
    """The parts of a response format that rendering does not look at. Raises ValueError."""
    if given is None:
        return
    is_schema = given.get("type") == "json_schema"
    check_keys(given, ("type", "json_schema") if is_schema else ("type",), "response_format")
    if not is_schema:
        return
    outer = given.get("json_schema")
    if not isinstance(outer, Mapping) or not isinstance(outer.get("name"), str) or not outer["name"]:
        raise ValueError("response_format json_schema needs a name, a text, in json_schema.name")
    if not isinstance(outer.get("schema"), Mapping):
        raise ValueError("response_format json_schema needs a schema, an object, in json_schema.schema")
    if not isinstance(outer.get("strict"), bool | None):
        raise ValueError(f"response_format: json_schema.strict is {outer['strict']!r}; it must be true or false")
    check_keys(outer, ("name", "schema", "strict", "description"), "response_format.json_schema")


def check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ValueError for what is given under another key: it would be lost. Null and false ask for nothing."""
    if lost := [key for key, value in given.items() if value not in (None, False) and key not in known]:
        raise ValueError(f"{where} has {lost[0]!r:.80}, which this server does not know; it takes {', '.join(known)}")


def read_tool_choice(choice: Any) -> tuple[str | None, str | None]:
    """(auto | none | required, the tool that must be called) of OpenAI's tool_choice. Raises ValueError."""
    if choice is None or isinstance(choice, str):
        return choice, None
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        raise ValueError("tool_choice must be auto, none, required, or name a function")
    return "required", name
