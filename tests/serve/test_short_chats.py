"""Conversations of a few hundred tokens: with the unit that an engine chooses for a small model every later turn goes
on where the one before ended, or at worst less than a unit before that; with the unit of large models none does."""

import pytest
import torch

import rille
from rille.model.model import new_model
from rille.serve.engine import Engine
from rille.serve.paged import layout_of
from rille.serve.retention import LARGEST_UNIT, SMALLEST_UNIT, unit_for
from rille.serve.schema import SamplingParams
from tests.serve.scripted import small_tokenizer
from tests.serve.served import Served
from tests.serve.test_leaks import real_server
from tests.train.small import MODEL

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(MODEL.replace(vocab_size=tokenizer.vocab_size, init_std=0.2), seed=3)


def talk(served, turns: int, thinking: bool) -> list[dict]:
    """The usage of each turn. The history has what the model wrote, as clients send it back."""
    messages, usages = [], []
    kind = {"type": "enabled" if thinking else "disabled"}
    for turn in range(turns):
        messages.append({"role": "user", "content": f"then call the tools {turn}"})
        body = {"messages": messages, "max_tokens": 40, "seed": turn, "thinking": kind}
        _, answer, _ = served.post(CHAT, body)
        reply = answer["choices"][0]["message"]
        messages.append({key: reply[key] for key in ("role", "content", "reasoning_content") if reply.get(key)})
        messages[-1].setdefault("content", "")
        usages.append(answer["usage"])
    return usages


@pytest.mark.parametrize("thinking", [True, False])
def test_the_second_turn_of_a_short_chat_is_mostly_cached(model, tokenizer, thinking):
    with real_server(model, tokenizer, num_pages=120, max_running=2) as (url, engine):
        assert engine.scheduler.cache.unit == SMALLEST_UNIT
        said = f"hash unit {SMALLEST_UNIT} tokens; a prefix of {SMALLEST_UNIT} is the shortest that is reused"
        assert any(said in line for line in engine.describe())
        usages = talk(Served(url, engine, None), 3, thinking)  # pyright: ignore[reportArgumentType]
    with real_server(model, tokenizer, num_pages=120, max_running=2, hash_unit=LARGEST_UNIT) as (url, _):
        rarely = talk(Served(url, engine, None), 3, thinking)  # pyright: ignore[reportArgumentType]
    assert [usage["prompt_tokens"] for usage in rarely] == [usage["prompt_tokens"] for usage in usages]
    short = 0
    for before, now, seldom in zip(usages, usages[1:], rarely[1:], strict=False):
        if SMALLEST_UNIT < before["prompt_tokens"] <= LARGEST_UNIT:
            assert now["cached_tokens"] >= before["prompt_tokens"] // SMALLEST_UNIT * SMALLEST_UNIT
            assert seldom["cached_tokens"] == 0
            short += 1
    assert short and usages[0]["cached_tokens"] == 0


def test_the_unit_follows_from_what_a_state_takes():
    sizes = {name: layout_of(rille.preset(name), torch.bfloat16) for name in ("tiny", "nano", "kimi-linear-48b", "k3")}
    units = {name: unit_for(layout.page_tokens, layout.groups) for name, layout in sizes.items()}
    assert units == {"tiny": 64, "nano": 64, "kimi-linear-48b": 256, "k3": 512}
    for worth in range(1, 30_000, 7):  # tokens of latents in the memory of a state
        unit = unit_for(worth, 1)
        assert SMALLEST_UNIT <= unit <= LARGEST_UNIT and 32_768 % unit == 0, "every interval's multiple"
        assert unit in (SMALLEST_UNIT, LARGEST_UNIT) or 16 * unit <= worth < 32 * unit


def test_short_prompts_end_at_boundaries_where_the_unit_was_not_asked_for(model):
    params = SamplingParams(max_tokens=1)
    for settings, length, cached in (({}, 300, 256), ({}, 512, 448), ({}, 513, 512), ({}, 600, 599), ({}, 60, 0),
                                     ({"hash_unit": 64}, 300, 299), ({"hash_unit": 64}, 65, 64)):  # fmt: skip
        engine = Engine(model, num_pages=120, **settings)
        for hit in (0, cached):
            [[one]] = engine.generate([[5 + length % 7] * length], params)
            assert one.usage.cached_tokens == hit, (settings, length)


def test_a_unit_that_is_asked_for_is_taken(model):
    engine = Engine(model, num_pages=120, hash_unit=192, checkpoint_interval=0)
    assert engine.scheduler.cache.unit == 192
    prompt = [5] * 193
    for cached in (0, 192):
        [[one]] = engine.generate([prompt], SamplingParams(max_tokens=1))
        assert one.usage.cached_tokens == cached
