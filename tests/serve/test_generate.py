"""Generation: equal to recomputation from scratch, sampling that obeys its arguments, arguments that are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rille
from rille.model.model import new_model
from rille.serve.generate import Sampler, generate, nucleus, prompt_ids, stream
from rille.text.tokenizer import train_tokenizer
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def model():
    """Weights large enough that the likeliest token is no tie."""
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def recomputed(model, tokens, count):
    """Greedy continuation with one whole forward pass a token."""
    for _ in range(count):
        tokens = torch.cat([tokens, model.logits(tokens)[-1:].argmax(-1)])
    return tokens[-count:]


@pytest.mark.parametrize("length", [1, 2, 17, 63, 64, 65])
def test_greedy_equals_recomputation(model, length):
    tokens = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length))
    new = generate(model, tokens, 12)
    assert new.dtype == torch.int64 and new.shape == (12,)
    assert torch.equal(new, recomputed(model, tokens, 12))
    assert list(stream(model, tokens, 12)) == new.tolist()


def test_the_released_model_continues_the_same():
    oracle = Path(__file__).resolve().parents[1] / "fixtures" / "oracle"
    io = load_file(oracle / "text_io.safetensors")
    new = generate(rille.load_model(oracle), io["input_ids"][0].long(), 16)
    assert new.tolist() == io["greedy_next_16"].tolist()


def test_probabilities_equal_recomputation(model):
    """Every step's logits, not only their largest."""
    tokens = torch.arange(20)
    seen = []

    def spy(logits, **rest):
        seen.append(logits.clone())
        return torch.argmax(logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "__call__", lambda self, logits: int(spy(logits)))
        new = generate(model, tokens, 8)
    whole = model.logits(torch.cat([tokens, new]))[19:-1]
    torch.testing.assert_close(torch.stack(seen), whole, rtol=0, atol=2e-4)


def test_the_prompt_goes_through_the_model_once(model):
    lengths = []
    forward = type(model).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", lambda self, t, ctx: lengths.append(len(t)) or forward(self, t, ctx))
        generate(model, torch.arange(30), 5)
    assert lengths == [30, 1, 1, 1, 1]


def test_stop_ids_end_it_and_are_its_last(model):
    tokens = torch.arange(9)
    free = generate(model, tokens, 12).tolist()
    stop = free[4]
    ended = generate(model, tokens, 12, stop_ids=(stop,)).tolist()
    assert ended == free[: free.index(stop) + 1]


def test_a_seed_repeats_and_another_differs(model):
    tokens = torch.arange(5)
    one = generate(model, tokens, 40, temperature=2.0, seed=1)
    assert torch.equal(one, generate(model, tokens, 40, temperature=2.0, seed=1))
    assert not torch.equal(one, generate(model, tokens, 40, temperature=2.0, seed=2))
    assert not torch.equal(generate(model, tokens, 40, temperature=2.0), generate(model, tokens, 40, temperature=2.0))


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(0.5, 1.0, torch.Generator().manual_seed(0))
    draws = torch.bincount(torch.tensor([sampler(logits) for _ in range(20_000)]), minlength=4) / 20_000
    expected = torch.softmax(logits / 0.5, -1)
    # four standard deviations of a share of 20,000 draws
    assert bool((draws - expected).abs().le(4 * (expected * (1 - expected) / 20_000).sqrt()).all())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [1]), (0.5, [1]), (0.51, [1, 3]), (0.8125, [1, 3]), (0.8126, [0, 1, 3]), (1.0, [0, 1, 2, 3])],
)
def test_nucleus(top_p, kept):
    probabilities = torch.tensor([0.125, 0.5, 0.0625, 0.3125])
    left = nucleus(probabilities, top_p)
    assert left.nonzero().flatten().tolist() == kept
    assert torch.equal(left[kept], probabilities[kept])


def test_stop_ids_of_any_kind(model):
    first = generate(model, torch.arange(7), 3)[:1]
    for stop_ids in (first.tolist(), first, iter(first.tolist())):
        assert torch.equal(generate(model, torch.arange(7), 3, stop_ids=stop_ids), first)


def test_small_temperature_and_top_p_become_greedy(model):
    tokens = torch.arange(7)
    greedy = generate(model, tokens, 10)
    assert torch.equal(generate(model, tokens, 10, temperature=1e-4, seed=0), greedy)
    assert torch.equal(generate(model, tokens, 10, temperature=1.0, top_p=1e-9, seed=0), greedy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.1}, r"temperature is -0\.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"tokens": torch.empty(0, dtype=torch.int64)}, "the prompt has no tokens"),
        ({"tokens": torch.tensor([5, 320])}, r"ids run from 5 to 320, the vocabulary has 0\.\.319"),
        ({"tokens": torch.tensor([-1])}, "ids run from -1"),
        ({"tokens": torch.tensor([1.0])}, "must be int64"),
    ],
)
def test_what_is_refused(model, arguments, message):
    arguments = {"tokens": torch.tensor([1]), "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(model, **arguments)


def test_no_new_tokens(model):
    assert generate(model, torch.tensor([1]), 0).tolist() == []


def test_a_prompt_begins_as_documents_did(model):
    tokenizer = train_tokenizer(["abcabc"], 320, note=lambda line: None)
    words = tokenizer.encode("abc")
    trained = new_model(MODEL.replace(bos_id=tokenizer.eos_id), device="meta")
    released = new_model(MODEL.replace(bos_id=7), device="meta")
    assert prompt_ids("abc", tokenizer, trained) == [tokenizer.eos_id, *words]
    assert prompt_ids("abc", tokenizer, released) == words
    assert prompt_ids("", tokenizer, trained) == [tokenizer.eos_id]
    small = new_model(MODEL.replace(vocab_size=300), device="meta")
    with pytest.raises(ValueError, match="the tokenizer has 320 tokens, the model only 300"):
        prompt_ids("abc", tokenizer, small)


def test_the_face_has_both():
    assert rille.generate is generate and rille.stream is stream
