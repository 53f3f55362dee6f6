"""Python functions as tools: schemas, checked arguments, errors that say what to do."""

from typing import Annotated, Any, Literal

import pytest

from rille.serve.tools import MAX_RESULT, ToolError, declare, fits, load_tools

FILE = '''
import math
from helper_beside import FACTOR

def scale(x: float, unit: str = "m", tags: list[str] | None = None) -> dict:
    """Scale a number.

    It is multiplied.

    Args:
        x: the number,
            any at all.
        unit (str): what it counts.

    Returns:
        The product.
    """
    return {"value": FACTOR * x, "unit": unit}

def _hidden(x): ...

class NotATool: ...
'''


def test_a_file_becomes_schemas(tmp_path):
    (tmp_path / "my_tools.py").write_text(FILE)
    (tmp_path / "helper_beside.py").write_text("FACTOR = 3\n")
    box = load_tools(tmp_path / "my_tools.py")
    assert box.schemas == [
        {
            "type": "function",
            "function": {
                "name": "scale",
                "description": "Scale a number.\n\nIt is multiplied.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "x": {"type": "number", "description": "the number, any at all."},
                        "unit": {"type": "string", "description": "what it counts.", "default": "m"},
                        "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    },
                    "required": ["x"],
                },
            },
        }
    ]
    assert box.run("scale", '{"x": 2, "tags": ["é"]}') == '{"value": 6, "unit": "m"}'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no public function"),
        ("def f(:", "fails when it is loaded: SyntaxError"),
        ("import not_there_at_all", "fails when it is loaded: ModuleNotFoundError"),
        ("raise SystemExit(3)", "fails when it is loaded: SystemExit"),
        ("def f(x: int): ...", r"f\(\) has no docstring"),
        ("def f(x):\n    'F.'", r"f\(\) has no type hint for 'x'"),
        ("def f(x: set):\n    'F.'", "'x' has the type set, which has no place in JSON; use str, int"),
        ("def f(x: dict[int, str]):\n    'F.'", "'x' has the type dict"),
        ("def f(x: 'Missing'):\n    'F.'", "type hint that cannot be read"),
        ("def f(*x: int):\n    'F.'", "takes \\*x: int; a tool's parameters are given by name"),
        ("async def f():\n    'F.'", "is async"),
    ],
)
def test_files_that_cannot_be_tools(tmp_path, source, message):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        load_tools(tmp_path / "bad.py")


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.py is no Python file"):
        load_tools(tmp_path / "absent.py")


def test_all_names_the_tools(tmp_path):
    (tmp_path / "two.py").write_text("__all__ = ['a']\ndef a():\n    'A.'\ndef b():\n    'B.'\n")
    assert list(load_tools(tmp_path / "two.py").tools) == ["a"]


def any_kind(
    choice: Literal["a", 1] = "a",
    note: Annotated[str, "what to note"] = "",
    table: dict[str, list[int]] | None = None,
    rest: Any = None,
) -> str:
    """Anything.

    :param choice: one of two
    :param int rest: what is left,
        if anything
    :returns: a text
    """
    return f"{choice}{note}{table}{rest}"


def test_kinds_of_hints():
    schema = declare(any_kind).schema["function"]
    assert schema["description"] == "Anything."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "choice": {"enum": ["a", 1], "description": "one of two", "default": "a"},
            "note": {"type": "string", "description": "what to note", "default": ""},
            "table": {
                "anyOf": [
                    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
                    {"type": "null"},
                ]
            },
            "rest": {"description": "what is left, if anything"},
        },
        "required": [],
    }


@pytest.mark.parametrize(
    ("value", "hint", "is_one"),
    [
        (1, int, True), (1, float, True), (1.0, int, False), (True, int, False), (1, bool, False), ("1", int, False),
        (None, int | None, True), ([1, "x"], list[int], False), ([1], list[int | str], True), ([], list, True),
        ({"a": 1}, dict[str, int], True), ({"a": "x"}, dict[str, int], False), ([], dict[str, int], False),
        ("a", Literal["a", "b"], True), (1, Literal[True], False), ("x", Any, True),
        ("x", Annotated[str, "note"], True),
    ],
)  # fmt: skip
def test_values_fit_hints(value, hint, is_one):
    assert fits(value, hint) is is_one


def test_what_a_function_raises_and_returns_is_text():
    def fail() -> None:
        """Fail."""
        raise KeyError("no such city")

    def leave() -> None:
        """Leave."""
        raise SystemExit(1)

    def talk_on() -> str:
        """Talk on."""
        return "x" * (MAX_RESULT + 5)

    for function, message in ((fail, "KeyError: 'no such city'"), (leave, "SystemExit: 1")):
        with pytest.raises(ToolError, match=message):
            declare(function).run("{}")
    assert declare(talk_on).run("").endswith("[cut here: 5 of 30,005 characters left out]")
    with pytest.raises(ToolError, match="must be a JSON object, not array"):
        declare(fail).run("[1]")


def loud(count: int) -> str:
    """Prints."""
    print("counting")
    return "x" * count


def test_what_a_tool_prints_is_no_answer(capsys):
    assert declare(loud).run('{"count": 3}') == "xxx"
    assert capsys.readouterr() == ("", "counting\n")


def test_arguments_that_nest_too_deep_are_told_to_the_model():
    def total(numbers: list[int]) -> int:
        """The sum."""
        return sum(numbers)

    for arguments in ("[" * 100_000, '{"numbers": ' + "[" * 100_000):
        with pytest.raises(ToolError, match="the arguments are not JSON"):
            declare(total).run(arguments)
