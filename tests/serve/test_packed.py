"""Serving a checkpoint whose experts stay in MXFP4: the tokens are those of the dequantised model."""

import pytest
import torch
import tyro

from rille.model.checkpoint import load_model, save_model
from rille.model.model import new_model
from rille.model.packed import has_packed_experts
from rille.serve.chat import open_conversation
from rille.serve.config import ChatConfig, ServeConfig
from rille.serve.dialogue import Finished
from rille.serve.engine import Engine
from rille.serve.generate import generate
from rille.serve.schema import SamplingParams
from tests.serve.scripted import small_tokenizer
from tests.train.small import MODEL

CONFIG = MODEL.replace(init_std=0.2)
SMALL = {"num_pages": 60, "hash_unit": 64, "checkpoint_interval": 0, "poison": True}
PROMPTS = [[3], list(range(5, 70)), [9, 8, 7] * 50]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("packed") / "model"
    save_model(new_model(CONFIG, seed=3), place, experts="mxfp4")
    return place


@pytest.mark.parametrize("budget", [16, 512])
def test_greedy_tokens_are_those_of_the_values(checkpoint, budget):
    served = Engine(checkpoint, experts="mxfp4", token_budget=budget, max_running=4, **SMALL)
    assert has_packed_experts(served.model)
    values = load_model(checkpoint)
    assert not has_packed_experts(values)
    params = SamplingParams(max_tokens=20, temperature=0)
    wanted = [tuple(generate(values, torch.tensor(ids), 20).tolist()) for ids in PROMPTS]
    assert len(set(wanted)) == 3  # not one answer to everything
    for _ in range(2):  # the second time from the cache
        assert [one.tokens for (one,) in served.generate(PROMPTS, params)] == wanted


def test_the_default_is_values(checkpoint):
    assert not has_packed_experts(Engine(checkpoint, **SMALL).model)


def test_what_cannot_stay_packed_is_refused(tmp_path):
    save_model(new_model(CONFIG, seed=3), tmp_path / "plain", experts="bf16")
    with pytest.raises(ValueError, match="is not packed, and experts='mxfp4' takes no other; `rille convert"):
        Engine(tmp_path / "plain", experts="mxfp4", **SMALL)
    with pytest.raises(ValueError, match="experts 'mxfp4' is for a checkpoint that is loaded"):
        Engine(new_model(CONFIG, seed=3), experts="mxfp4", **SMALL)


def test_a_model_with_packed_experts_may_be_given(checkpoint):
    model = load_model(checkpoint, experts="mxfp4")
    assert Engine(model, experts="mxfp4", **SMALL).model is model
    with pytest.raises(ValueError, match=r"w13 is torch.float32, the model's is torch.uint8"):
        Engine(model, **SMALL).update_weights(new_model(CONFIG, seed=1).named_parameters(), version=1)


def test_chat_says_what_the_values_say(tmp_path):
    tokenizer = small_tokenizer()
    save_model(new_model(CONFIG.replace(vocab_size=tokenizer.vocab_size), seed=3), tmp_path, experts="mxfp4")
    tokenizer.save(tmp_path)
    replies, about = [], []
    for experts in ("values", "mxfp4"):
        config = ChatConfig(checkpoint=str(tmp_path), temperature=0, max_new_tokens=12, experts=experts)
        talk, line = open_conversation(config)
        last = list(talk.say("Hello"))[-1]
        assert isinstance(last, Finished)
        replies.append(last.reply)
        about.append(line)
    assert replies[0] == replies[1] and about[0] == about[1]  # and as many parameters


def test_the_command_line_knows_the_setting():
    given = tyro.cli(ServeConfig, args=["runs/first", "--engine.experts", "mxfp4"])
    assert given.engine.experts == "mxfp4"
