"""An argument or setting of a name that does not exist is one line with the nearest that does, all over the face."""

from dataclasses import fields, is_dataclass, replace
from inspect import Parameter, isclass, signature

import pytest

import rille
from rille.misspelt import check_names, named, suggestion
from rille.serve.config import BenchServeConfig, ChatConfig, GenerateConfig, ServeConfig
from rille.serve.schema import Request
from rille.serve.settings import EngineConfig

FACE = [thing for name in rille.__all__ if callable(thing := getattr(rille, name))]
SETTINGS = [EngineConfig, Request, GenerateConfig, ChatConfig, ServeConfig, BenchServeConfig]


def arguments(taker) -> list[str]:
    """What it takes by name; an engine takes its settings so."""
    if isclass(taker) and is_dataclass(taker):
        return [field.name for field in fields(taker)]
    given = signature(taker).parameters.values()
    more = [field.name for field in fields(EngineConfig)] if taker is rille.Engine else []
    return [p.name for p in given if p.kind is not Parameter.VAR_KEYWORD] + more


@pytest.mark.parametrize("taker", [*FACE, *SETTINGS], ids=lambda taker: taker.__name__)
def test_every_name_of_the_face_that_is_a_letter_off(taker):
    known = arguments(taker)
    assert known
    positional = [None] * (taker is rille.Engine)
    for name in known:
        for wrong in (name[:-1] if len(name) > 1 else name + "_", name + "s", name[0] + name):
            if wrong in known:
                continue
            line = rf"^{taker.__name__} takes no '{wrong}'; did you mean '\w+'\?$"
            with pytest.raises(ValueError, match=line) as told:
                taker(*positional, **{wrong: 1})
            assert any(f"'{other}'" in str(told.value) for other in known), "it exists"
    with pytest.raises(ValueError, match=rf"takes no 'qqqq'; it takes .*\b{known[-1]}\b"):
        taker(*positional, qqqq=1)


def test_the_nearest_is_told():
    model = rille.new_model(rille.preset("tiny").replace(num_layers=1, mla_layers=()))
    for wrong, right in (("num_page", "num_pages"), ("hash_units", "hash_unit"), ("tokeniser", "tokenizer"),
                         ("max_len", "max_length"), ("conf", "config")):  # fmt: skip
        with pytest.raises(ValueError, match=f"Engine takes no '{wrong}'; did you mean '{right}'"):
            rille.Engine(model, **{wrong: 1})
    with pytest.raises(ValueError, match="SamplingParams takes no 'max_new_tokens'; did you mean 'max_tokens'"):
        rille.SamplingParams(max_new_tokens=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="K3Config takes no 'hidden'; did you mean 'hidden_size'"):
        rille.preset("tiny").replace(hidden=4)
    with pytest.raises(ValueError, match="EngineConfig takes no 'dtyp'; did you mean 'dtype'"):
        replace(EngineConfig(), dtyp="bf16")  # pyright: ignore[reportCallIssue]


def test_what_is_right_goes_through():
    """With its defaults, and with the kind of fault of its own."""

    @named
    def both(a, /, b, *rest, c=3):
        return a, b, rest, c

    assert both(1, 2, 4, c=5) == (1, 2, (4,), 5) and both(1, b=2) == (1, 2, (), 3)
    with pytest.raises(ValueError, match="both takes no 'a'; it takes b, c"):
        both(1, a=2)
    with pytest.raises(TypeError, match="missing"):
        both(1)
    assert signature(rille.load_model).parameters.keys() >= {"path", "dtype", "layers"} and rille.load_model.__doc__
    assert suggestion("tran", ["train"]) == "; did you mean 'train'?" and suggestion("xyz", ["train"]) == ";"
    check_names("it", [], [])
