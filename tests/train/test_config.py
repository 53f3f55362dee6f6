"""Settings: what they refuse, how they are compared, and that the flags are their fields and nothing else."""

import re
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest
from tyro.extras import overridable_config_cli

from rille.model.config import K3Config
from rille.model.presets import preset
from rille.model.vision_config import VisionConfig
from rille.recipes.pretrain import RECIPES, tiny
from rille.train.config import PARTS, TrainConfig, check_resumable, settings


@pytest.mark.parametrize("name", ["steps", "accumulate", "eval_every", "eval_tokens", "checkpoint_every", "keep"])
def test_counts_are_at_least_one(name):
    for value in (0, -3):
        with pytest.raises(ValueError, match=rf"^{name} is {value}; it must be at least 1$"):
            replace(tiny(), **{name: value})


def test_other_faults_are_named():
    with pytest.raises(ValueError, match="seed is -1"):
        replace(tiny(), seed=-1)
    with pytest.raises(ValueError, match="seed is 9223372036854775808"):
        replace(tiny(), seed=2**63)
    for minutes in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_minutes is .*; it must be above 0, or none"):
            replace(tiny(), max_minutes=minutes)
    with pytest.raises(ValueError, match="out is empty"):
        replace(tiny(), out="")
    with pytest.raises(ValueError, match=r"data\.vocab_size is 4096 and model\.vocab_size \d+"):
        replace(tiny(), data=replace(tiny().data, vocab_size=4096))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    recipe = RECIPES[name]
    assert recipe().data.vocab_size == recipe().model.vocab_size
    assert recipe.__doc__ and "\n" not in recipe.__doc__


def field_names(kind: type, prefix: str = "") -> set[str]:
    """Dotted names of all fields that a command line can set: neither dicts nor parts that may be absent."""
    names = set()
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            names |= field_names(hints[field.name], f"{prefix}{field.name}.")
        elif "dict" not in str(hints[field.name]) and not any(map(is_dataclass, get_args(hints[field.name]))):
            names.add(prefix + field.name)
    return names


def test_flags_are_the_fields(capsys):
    with pytest.raises(SystemExit) as end:
        overridable_config_cli({"tiny": ("", tiny())}, args=["tiny", "--help"])
    assert end.value.code == 0
    heads = re.findall(r"^[^\w-]{1,3}(-[^ ].*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    flags = {flag for head in heads for flag in re.findall(r"--[a-z][a-z.-]*", head)}
    expected = {f"--{name.replace('_', '-')}" for name in field_names(TrainConfig)} | {"--help", "--data"}
    assert {flag for flag in flags if "no-" not in flag} == expected
    assert {"--steps", "--out", "--data", "--resume", "--seed", "--optim.lr"} <= flags


def test_settings_are_flat_and_whole():
    flat = settings(tiny())
    assert flat["steps"] == tiny().steps
    assert flat["optim.betas"] == list(tiny().optim.betas)
    assert flat["model.mla_layers"] == list(tiny().model.mla_layers)
    assert field_names(TrainConfig) <= set(flat)


def test_what_may_change_on_resume():
    saved = settings(tiny())
    free = replace(tiny(), out="elsewhere", steps=9999, resume=True, eval_every=3, checkpoint_every=5, keep=7)
    check_resumable(saved, settings(free), "run")
    other = replace(tiny(), seed=5, optim=replace(tiny().optim, lr=0.5))
    with pytest.raises(ValueError, match=r"run is of a run with other settings: seed 0, now 5; optim\.lr .*, now 0\.5"):
        check_resumable(saved, settings(other), "run")


def test_another_preset_gives_a_short_message():
    with pytest.raises(ValueError, match=r"other settings: .* and \d+ more\. Resume with the same") as error:
        check_resumable(settings(tiny()), settings(RECIPES["nano"]()), "run")
    assert len(str(error.value)) < 600


def without(saved: dict, *names: str) -> dict:
    return {name: value for name, value in saved.items() if name not in names}


def test_a_setting_newer_than_the_checkpoint_stood_at_its_default():
    """Whichever it is, and all at once; of a recipe's value that is not the default it says so."""
    config = TrainConfig(out="run", steps=300, model=preset("tiny"))
    now = settings(config)
    known = {name for name in now if name not in ("out", "steps")}
    needed = {name for name in known if name.startswith("model.") and name[6:] in REQUIRED_OF_MODEL}
    assert len(known - needed) > 40 and len(needed) > 10
    for name in known:
        if name in needed:
            with pytest.raises(ValueError, match=rf"settings: {re.escape(name)} unknown, now "):
                check_resumable(without(now, name), now, "run")
        elif now[name] == default_of(name):
            check_resumable(without(now, name), now, "run")
        else:
            shown = re.escape(f"{name} {default_of(name)}, now {now[name]}")
            with pytest.raises(ValueError, match=rf"settings: {shown}"):
                check_resumable(without(now, name), now, "run")
    at_default = [name for name in known - needed if now[name] == default_of(name)]
    check_resumable(without(now, *at_default), now, "run")
    changed = settings(replace(config, optim=replace(config.optim, qk_clip=100.0)))
    with pytest.raises(ValueError, match=r"settings: optim\.qk_clip None, now 100\.0\. Resume"):
        check_resumable(without(now, "optim.qk_clip"), changed, "run")


REQUIRED_OF_MODEL = {field.name for field in fields(K3Config) if field.default is MISSING}


def default_of(name: str):
    part, _, field = name.rpartition(".")
    kind = ({"": TrainConfig} | PARTS)[part]
    value = {f.name: f.default for f in fields(kind)}[field]
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("value", [3, None])
def test_a_setting_unknown_here_is_a_difference(value):
    now = settings(tiny())
    with pytest.raises(ValueError, match=rf"settings: optim\.novel {value}, now unknown\. Resume"):
        check_resumable({**now, "optim.novel": value}, now, "run")


def test_a_vision_tower_that_was_not_there_is_a_difference():
    """Its settings have defaults, but it had none; of one that was there a new setting has."""
    seeing = replace(tiny(), model=tiny().model.replace(vision=VisionConfig(text_width=tiny().model.hidden_size)))
    plain, now = settings(tiny()), settings(seeing)
    for saved in (plain, without(plain, "model.vision")):
        with pytest.raises(ValueError, match="other settings: model.vision"):
            check_resumable(saved, now, "run")
    check_resumable(without(now, "model.vision.num_layers"), now, "run")
    with pytest.raises(ValueError, match="other settings: model.vision"):
        check_resumable(now, plain, "run")
