"""What a user's Python may give an engine by mistake: one line that says what it must be, and what runs beside it goes
on."""

import math

import pytest
import torch

from rille.model.model import new_model
from rille.serve.schema import Request, SamplingParams
from rille.serve.speculation import Draft
from tests.serve.scripted import small_tokenizer
from tests.serve.test_engine import GREEDY, MODEL, engine


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL, seed=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(device="tpu"), "device is 'tpu'; it must be cpu or cuda"),
        (dict(preemption="swap"), "preemption is 'swap'; it must be recompute or offload"),
        (dict(drafter="eagle"), "drafter is 'eagle'; it must be none or ngram or mtp"),
        (dict(tokenizer="x"), "the tokenizer is str 'x'; give one of rille.load_tokenizer"),
        (dict(tokenizer=small_tokenizer()), "the tokenizer has 400 tokens, the model only 320"),
        (dict(drafter=5), "drafter is 5; it must be none, ngram, mtp, or an object"),
        (dict(num_pages=2.5), "num_pages is 2.5; it must be int or None"),
        (dict(hash_unit="64"), "hash_unit is '64'"),
        (dict(checkpoint_interval=128.0), "checkpoint_interval is 128.0; it must be int"),
        (dict(memory_gib=math.inf), "memory_gib is inf; it must be float or None"),
        (dict(host_gib=math.nan), "host_gib is nan"),
        (dict(memory_gib=1e6), "a pool of 1,000,000.0 GiB is more than this machine's memory, .* GiB; give a smaller"),
        (dict(num_pages=10**12), "a pool of .* GiB is more than this machine's memory"),
        (dict(deterministic="no"), "deterministic is 'no'; it must be bool"),
        (dict(max_running=True), "max_running is True; it must be int"),
        (dict(host_gib=1e-9), "host_gib is 1e-09, 0 pages of .* take 3 pages: give .* or more, or 0"),
        (
            dict(host_gib=2e-5, preemption="offload"),
            "host_gib is 2e-05, 3 pages of .* take 3 pages, twice with offload",
        ),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(model, wrong, message):
    """None is taken for another, and none that would never be of use."""
    with pytest.raises(ValueError, match=message):
        engine(model, **{"num_pages": None, **wrong} if "memory_gib" in wrong else wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(prompt=[1.5]), "an id of the prompt is 1.5"),
        (dict(prompt="abc"), "give a list of token ids"),
        (dict(prompt=5), "give a list of token ids"),
        (dict(prompt=[1], priority="high"), "priority is 'high'"),
        (dict(prompt=[1], deadline_s="2"), "deadline_s is '2'"),
        (dict(prompt=[1], deadline_s=10**400), "deadline_s is a number of 1,329 bits"),
        (dict(prompt=[1], kind="huge"), "kind 'huge' is not one of"),
        (dict(prompt=[1], marks=[0.5]), "one of marks is 0.5"),
        (dict(prompt=[1], marks=1), "marks is 1; give a list"),
        (dict(prompt=[1], images=1), "images is 1; give a list"),
        (dict(prompt=[1], id=["a"]), "id is .* it must be a text"),
        (dict(prompt=[1], params={"n": 1}), "params is .* give SamplingParams"),
    ],
)
def test_a_request_of_the_wrong_kind_is_its_own_fault(model, wrong, message):
    """Refused where it is made or handed in; what runs beside it goes on."""
    served = engine(model)
    handle = served.submit(Request(prompt=(1, 2, 3), params=SamplingParams(max_tokens=5)))
    with pytest.raises(ValueError, match=message):
        served.submit(Request(**wrong))
    assert list(handle)[-1].reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, GREEDY, "prompts is None; give a list of lists"),
        ("abc", GREEDY, "prompts is 'abc'; give a list of lists"),
        ([b"abc"], GREEDY, "a prompt is b'abc'; give a list"),
        ([[1]], [None], "params is None; give SamplingParams"),
        ([[1]], {"max_tokens": 3}, "params is .* give SamplingParams"),
        ([[1]], 5, "params is 5; give SamplingParams"),
        ([[1]], [GREEDY] * 2, "1 prompts but 2 sampling parameters"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(model, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        engine(model).generate(prompts, params)


def test_a_parameter_of_sampling_is_no_argument_of_generate(model):
    with pytest.raises(ValueError, match="generate takes no 'max_tokens'; it takes prompts, params"):
        engine(model).generate([[1]], max_tokens=4)


def test_iterators_are_lists_too(model):
    served = engine(model)
    [[want]] = served.generate([[1, 2, 3]], GREEDY)
    [[one]] = served.generate((iter([1, 2, 3]) for _ in range(1)), (GREEDY for _ in range(1)))
    [*_, last] = served.submit(Request(prompt=iter([1, 2, 3]), params=GREEDY))
    assert one.tokens == want.tokens and last.usage.prompt_tokens == 3


def test_ids_may_come_as_tensors(model):
    ids, greedy = torch.tensor([5, 6, 7]), SamplingParams(max_tokens=5, temperature=0)
    served = engine(model)
    [[one]], [[two]] = served.generate([ids], greedy), served.generate([ids.tolist()], greedy)
    assert one.tokens == two.tokens == tuple(one.tokens)
    assert Request(prompt=[*ids]).prompt == (5, 6, 7)


class Stranger:
    """A drafter of another vocabulary, and of no manners: it guesses more than it is asked for."""

    def __init__(self, reads_hidden):
        self.reads_hidden = reads_hidden

    def propose(self, sequence, limit):
        return Draft((5, 319, 320, -1, 2**40) * (1 + limit))

    def observe(self, sequence, start, hidden_ND, following):
        pass

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("reads_hidden", [True, False])
def test_guesses_of_words_that_the_model_lacks_do_not_come_true(model, reads_hidden):
    served = engine(model, drafter=Stranger(reads_hidden), adaptive_drafts=False, draft_length=4)
    [[want]] = engine(model).generate([[1, 2, 3]], GREEDY)
    [[one]] = served.generate([[1, 2, 3]], GREEDY)
    assert one.tokens == want.tokens and 0 < served.stats().drafted <= 2 * served.stats().drafts
