"""Generation: equal to recomputation from scratch, sampling that obeys its arguments, arguments that are refused."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import rille
from rille.model.model import K3, new_model
from rille.serve.generate import Sampler, generate, nucleus, prompt_ids, stream
from rille.serve.session import Session
from rille.text.images import ImageConfig
from rille.text.tokenizer import train_tokenizer
from tests.train.small import MODEL

ORACLE = Path(__file__).resolve().parents[1] / "fixtures" / "oracle"


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
    io = load_file(ORACLE / "text_io.safetensors")
    new = generate(rille.load_model(ORACLE), io["input_ids"][0].long(), 16)
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
        ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is float 2.0; it must be a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"max_new_tokens": "5"}, "max_new_tokens is str '5'"),
        ({"temperature": -0.1}, r"temperature is -0\.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-45}, "temperature is 1e-45; below 1e-06 give 0"),
        ({"temperature": "1"}, "temperature is str '1'; it must be a number"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_p": "a"}, "top_p is str 'a'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is float 1.5"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"stop_ids": 5}, r"stop_ids is int 5; it must be a collection of token ids, such as \(5,\)"),
        ({"stop_ids": None}, "stop_ids is None"),
        ({"stop_ids": "5"}, "stop_ids is str '5'"),
        ({"stop_ids": [1.5]}, "an id of stop_ids is float 1.5"),
        ({"stop_ids": [320]}, "an id of stop_ids is 320; it must be at least 0 and at most 319"),
        ({"stop_ids": [-1]}, "an id of stop_ids is -1"),
        ({"tokens": torch.empty(0, dtype=torch.int64)}, "the prompt has no tokens"),
        ({"tokens": torch.tensor([5, 320])}, r"ids run from 5 to 320, the vocabulary has 0\.\.319"),
        ({"tokens": torch.tensor([-1])}, "ids run from -1"),
        ({"tokens": torch.tensor([1.0])}, "must be int64"),
        ({"tokens": torch.tensor([[1]])}, r"int64 tensor of shape \[1, 1\]"),
        ({"tokens": torch.tensor(1)}, r"int64 tensor of shape \[\]"),
        ({"tokens": [1]}, "tokens must be an int64 tensor"),
        ({"model": None}, "model must be a K3 model"),
    ],
)
def test_what_is_refused(model, arguments, message):
    """At the call, before the first id is asked for."""
    arguments = {"model": model, "tokens": torch.tensor([1]), "max_new_tokens": 2, **arguments}
    for call in (generate, stream):
        with pytest.raises(ValueError, match=message):
            call(**arguments)


def test_a_part_of_a_model_is_refused():
    part: K3 = K3(MODEL, dtype=torch.float32, device="cpu", layers=range(1))
    with pytest.raises(ValueError, match=r"holds layers range\(0, 1\) of"):
        generate(part, torch.tensor([1]), 2)


@pytest.fixture(scope="module")
def seeing():
    """The released model with its tower, and a prompt of the vocabulary's own media tokens."""
    model = rille.load_model(ORACLE)
    assert model.config.vision is not None and model.config.media_pad_id is not None
    pictures = [picture((90, 60), 1), picture((30, 85), 2)]
    config = ImageConfig(patch=model.config.vision.patch_size, merge=model.config.vision.merge[0])
    media = model.config.media_pad_id
    return model, torch.tensor([5, media, 9, 11, media, 3]), rille.preprocess_images(pictures, config)


def picture(size, seed):
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def test_pictures_equal_recomputation(seeing):
    """The ids are those of the text; a picture's rows are in the memory alone."""
    model, prompt, images = seeing
    tokens = prompt
    for _ in range(8):
        tokens = torch.cat([tokens, model.logits(tokens, images=images)[-1:].argmax(-1)])
    new = generate(model, prompt, 8, images=images)
    assert torch.equal(new, tokens[len(prompt) :])
    assert list(stream(model, prompt, 8, images=images)) == new.tolist()
    assert not torch.equal(new, generate(model, prompt, 8))  # without them a media token is a token like any other
    swapped = rille.preprocess_images([picture((90, 60), 3), picture((30, 85), 4)])
    first = model.logits(prompt, images=images, rows=[-1])
    assert not torch.equal(first, model.logits(prompt, images=swapped, rows=[-1]))


def test_a_conversation_says_the_same(seeing):
    model, prompt, images = seeing
    session = Session(model)
    logits, new = session.read(prompt.tolist(), [images]), []
    for _ in range(8):
        new.append(int(logits.argmax()))
        logits = session.extend(new[-1])
    assert new == generate(model, prompt, 8, images=images).tolist()


def test_pictures_that_do_not_fit(seeing):
    model, prompt, images = seeing
    with pytest.raises(ValueError, match="1 media tokens"):
        generate(model, prompt[:3], 2, images=images)
    with pytest.raises(ValueError, match="images must come from rille.preprocess_images"):
        generate(model, prompt, 2, images=[Image.new("RGB", (4, 4))])  # type: ignore[arg-type]


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
