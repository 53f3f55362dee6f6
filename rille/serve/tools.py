"""Tools from a Python file: its public functions as JSON schemas, and their calls carried out.

    def weather(city: str, days: int = 1) -> str:        ->   {"name": "weather", "description": "The forecast.",
        '''The forecast.                                       "parameters": {"type": "object", "properties":
                                                                {"city": {"type": "string", "description": "..."}, ...
        Args:
            city: where, in English.
        '''

Type hints become types, the docstring becomes the description, its `Args:` section (or `:param x:` lines) describes the
parameters. What the model gives is held against the hints before the function runs; what goes wrong then, in the
arguments or in the function, is told to the model. No torch here.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_RESULT = 30_000  # characters of a result that the model gets to read
_PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_TYPES = "str, int, float, bool, None, list[...], dict[str, ...], Literal[...], and unions of these"


class ToolError(ValueError):
    """A call that could not be carried out; its text is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function and how it is declared (the OpenAI form)."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    hints: Mapping[str, Any]

    def run(self, arguments: str) -> str:
        """The result as text; what the function prints goes to standard error. arguments: JSON. Raises ToolError for
        whatever goes wrong."""
        given = self._read(arguments)
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the model's answers
                return result_text(self.function(**given))
        except (Exception, SystemExit) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _read(self, arguments: str) -> dict[str, Any]:
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON ({error})") from None
        if not isinstance(given, dict):
            raise ToolError(f"the arguments must be a JSON object, not {json_type(given)}")
        try:
            inspect.signature(self.function).bind(**given)
        except TypeError as error:
            raise ToolError(f"{error}; the parameters are {', '.join(self.hints) or 'none'}") from None
        for name, value in given.items():
            if not fits(value, self.hints[name]):
                wanted = json.dumps(type_schema(self.hints[name], name), ensure_ascii=False)
                raise ToolError(
                    f"argument {name!r} is {json_type(value)} {json.dumps(value)[:100]}; it must be {wanted}"
                )
        return given


@dataclass(frozen=True)
class Toolbox:
    """Tools by name."""

    tools: Mapping[str, Tool]

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def run(self, name: str, arguments: str) -> str:
        """The result of a call as text. Raises ToolError where the call cannot be carried out."""
        if name not in self.tools:
            raise ToolError(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        return self.tools[name].run(arguments)


def load_tools(path: str | Path) -> Toolbox:
    """The public functions that a Python file defines (those in its `__all__`, if it has one).

    The file runs as a script would: modules beside it can be imported. Raises ValueError for a file that is missing or
    fails, one without public functions, and a function that cannot be declared.
    """
    path = Path(path)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"tools: {path} is no Python file; give a .py file with functions")
    module = _run_file(path)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    functions = {name: getattr(module, name, None) for name in names}
    tools = {
        name: declare(function)
        for name, function in functions.items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }
    if not tools:
        raise ValueError(
            f"tools: {path} defines no public function; a tool is `def name(x: str) -> str:` with a docstring"
        )
    return Toolbox(tools)


def _run_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"tools: {path} fails when it is loaded: {type(error).__name__}: {error}") from error
    return module


def declare(function: Callable[..., Any]) -> Tool:
    """A function as a tool. Raises ValueError that says what its definition lacks."""
    where = f"tools: {function.__name__}()"
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{where} is async; give a plain function")
    about = inspect.getdoc(function)
    if not about:
        raise ValueError(f"{where} has no docstring, which tells the model what it does")
    description, notes = read_docstring(about)
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ValueError(f"{where} has a type hint that cannot be read ({error})") from None
    hints.pop("return", None)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where} takes {parameter}; a tool's parameters are given by name, one by one")
        if name not in hints:
            raise ValueError(f"{where} has no type hint for {name!r}; write one of {_TYPES}")
        properties[name] = _parameter_schema(parameter, hints[name], notes.get(name), where)
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": description, "parameters": parameters}
    return Tool(function, {"type": "function", "function": described}, hints)


def _parameter_schema(parameter: inspect.Parameter, hint: Any, note: str | None, where: str) -> dict[str, Any]:
    schema = type_schema(hint, f"{where}: {parameter.name!r}")
    if note:
        schema.setdefault("description", note)
    if isinstance(parameter.default, str | int | float):
        schema["default"] = parameter.default
    return schema


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises ValueError for a type that JSON does not have."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        notes = [note for note in inner[1:] if isinstance(note, str)]
        return type_schema(inner[0], where) | ({"description": " ".join(notes)} if notes else {})
    if origin is Literal and all(isinstance(value, str | int | bool | None) for value in inner):
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(part, where) for part in inner]}
    if origin in (list, Sequence):
        return {"type": "array", "items": type_schema(inner[0], where)}
    if origin in (dict, Mapping) and inner[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inner[1], where)}
    raise ValueError(
        f"{where} has the type {getattr(hint, '__name__', hint)}, which has no place in JSON; use {_TYPES}"
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of a hinted type. Whole numbers are numbers too, truth values are not."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint in _PLAIN:
        return type(value) in ((int, float) if hint is float else (hint,))
    if origin is Annotated:
        return fits(value, inner[0])
    if origin is Literal:
        return any(value == known and type(value) is type(known) for known in inner)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if origin in (list, Sequence):
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())


_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_HEADING = re.compile(r"^\w[\w ]*:\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:[ \t]*(.*(?:\n(?!\s+\w+\s*(?:\([^)]*\))?:).*)*)", re.MULTILINE)
_PARAM = re.compile(r"^:param (?:\w+ )?(\w+):[ \t]*(.*(?:\n(?!:).*)*)", re.MULTILINE)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description, and what the docstring says of each parameter: an `Args:` section, or `:param x:` lines."""
    if section := _SECTION.search(text):
        body = text[section.end() :]
        end = _HEADING.search(body)
        entries = _ENTRY.findall(body[: end.start()] if end else body)
        return text[: section.start()].strip(), {name: " ".join(note.split()) for name, note in entries}
    notes = {name: " ".join(note.split()) for name, note in _PARAM.findall(text)}
    return re.split(r"^:\w+", text, maxsplit=1, flags=re.MULTILINE)[0].strip(), notes


def result_text(result: Any) -> str:
    """What the model reads: texts as they are, everything else as JSON; too long ones cut, which is said."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > MAX_RESULT:
        return f"{text[:MAX_RESULT]}\n[cut here: {len(text) - MAX_RESULT:,} of {len(text):,} characters left out]"
    return text


def json_type(value: Any) -> str:
    return next((name for kind, name in _PLAIN.items() if type(value) is kind), type(value).__name__)
