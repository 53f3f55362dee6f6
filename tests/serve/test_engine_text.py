"""The engine with a tokenizer, in a thread, from an event loop: stop strings, grammars, pictures, aborts, deadlines."""

import asyncio
import random
import sys
import threading
import time
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
import torch

from rille.model.model import new_model
from rille.model.presets import preset
from rille.model.vision_config import VisionConfig
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.generate import generate
from rille.serve.schema import Finished, QueueFull, Request, SamplingParams, TokenOutput, Unavailable
from rille.text.images import Images
from rille.text.media import expand_media
from rille.text.tokenizer import train_tokenizer
from tests.serve.lively import lively_model, lively_tokenizer
from tests.serve.test_engine import alone, prompt
from tests.train.small import MODEL

model = pytest.fixture(lively_model, scope="module")
tokenizer = pytest.fixture(lively_tokenizer, scope="module")


@pytest.fixture
def served(model, tokenizer):
    made = Engine(model, tokenizer=tokenizer, num_pages=120, hash_unit=64, poison=True)
    yield made
    made.close()
    audit_scheduler(made.scheduler)
    assert made.scheduler.cache.available == 120


def text_of(tokenizer, tokens):
    return tokenizer.decode(token for token in tokens if token < tokenizer.vocab_size)


def only(tokenizer, *texts):
    """A bias that leaves these texts' tokens, and makes them go round."""
    return {token: 1000.0 for text in texts for token in tokenizer.encode(text)}


def test_a_stop_string_ends_the_reply_and_is_not_in_its_text(served, tokenizer):
    params = SamplingParams(
        max_tokens=60, temperature=5.0, seed=1, logit_bias=only(tokenizer, "abc"), stop=("ca", "zz")
    )
    [[one]] = served.generate([[1, 2]], params)
    assert (one.reason, one.matched) == ("stop", "ca")
    whole = text_of(tokenizer, one.tokens)
    assert whole.startswith(one.text) and "ca" in whole and "ca" not in one.text
    free = SamplingParams(max_tokens=20, temperature=5.0, seed=1, logit_bias=only(tokenizer, "abc"), stop=("zz",))
    [[two]] = served.generate([[1, 2]], free)
    assert two.reason == "length" and two.text == text_of(tokenizer, two.tokens)
    late = SamplingParams(
        max_tokens=60,
        temperature=5.0,
        seed=1,
        logit_bias=only(tokenizer, "abc"),
        stop=("ca",),
        min_tokens=len(one.tokens) + 5,
    )
    [[three]] = served.generate([[1, 2]], late)
    assert len(three.tokens) >= len(one.tokens) + 5 and "ca" in three.text


def test_the_models_own_stops(served, tokenizer):
    eos = tokenizer.specials["<|end_of_msg|>"]
    params = SamplingParams(max_tokens=8, temperature=0, logit_bias={eos: 1e6})
    [[one]] = served.generate([[1]], params)
    assert (one.tokens, one.reason, one.matched, one.text) == ((eos,), "stop", eos, "")
    [[two]] = served.generate(
        [[1]], SamplingParams(max_tokens=8, temperature=0, logit_bias={eos: 1e6}, ignore_eos=True)
    )
    assert two.tokens == (eos,) * 8 and two.reason == "length"
    [[three]] = served.generate([[1]], SamplingParams(max_tokens=8, temperature=0, logit_bias={eos: 1e6}, min_tokens=3))
    assert len(three.tokens) == 4 and eos not in three.tokens[:3]


def test_outputs_come_one_by_one_from_a_thread(served, model):
    served.start()
    ids = prompt(70)
    request = Request(prompt=ids, params=SamplingParams(max_tokens=12, temperature=0, n=2, ignore_eos=True))
    outputs = list(served.submit(request))
    for index in range(2):
        mine = [output for output in outputs if output.index == index]
        assert tuple(o.token for o in mine[:-1]) == alone(model, ids, 12) and isinstance(mine[-1], Finished)
    assert served.generate([ids], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0][0].tokens == alone(
        model, ids, 5
    )


@pytest.mark.parametrize("index", [0, 2])
def test_one_choice_is_ended_and_the_others_go_on(served, model, index):
    """The one whose reading of the prompt the others shared, or another."""
    served.start()
    ids = prompt(70)
    request = Request(prompt=ids, params=SamplingParams(max_tokens=40, temperature=0, n=3, ignore_eos=True))
    handle, said = served.submit(request), {0: [], 1: [], 2: []}
    for output in handle:
        said[output.index].append(output)
        if output.index == index and len(said[index]) == 4:
            served.abort(handle.id, index)
    for choice, mine in said.items():
        assert mine[-1].reason == ("abort" if choice == index else "length")
        assert tuple(o.token for o in mine[:-1]) == alone(model, ids, 40)[: len(mine) - 1]
    assert len(said[index]) < 40
    assert served.stats().pages_used == 0


def test_many_readers_and_aborts(served, model):
    """Threads that hand in, read a little and leave; nothing is lost and what is read to its end is right."""
    served.start()
    faults = []

    def client(n):
        ids = prompt(20 + n, seed=n % 4)
        params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
        handle = served.submit(Request(prompt=ids, params=params))
        tokens = []
        for output in handle:
            if isinstance(output, TokenOutput):
                tokens.append(output.token)
                if n % 3 == 0 and len(tokens) == 4:
                    served.abort(handle.id)
            elif output.reason != ("abort" if n % 3 == 0 else "length"):
                faults.append((n, output))
        if tuple(tokens) != alone(model, ids, 15)[: len(tokens)]:
            faults.append((n, tokens))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert faults == [] and served.stats().running == 0
    assert sum(served.stats().finished.values()) == 16


def test_an_event_loop_reads_several_at_once(served, model):
    served.start()

    async def read(n):
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        handle = served.submit(Request(prompt=prompt(30, seed=n), params=params))
        return [output.token async for output in handle if isinstance(output, TokenOutput)]

    async def all_of_them():
        return await asyncio.gather(*(read(n) for n in range(4)))

    for n, tokens in enumerate(asyncio.run(all_of_them())):
        assert tuple(tokens) == alone(model, prompt(30, seed=n), 8)


def test_close_answers_everybody(model):
    served = Engine(model, num_pages=120, hash_unit=64)
    served.start()
    handle = served.submit(Request(prompt=prompt(20), params=SamplingParams(max_tokens=5000)))
    outputs = iter(handle)
    next(outputs)
    served.close()
    *_, last = outputs
    assert isinstance(last, Finished) and last.reason == "abort"
    with pytest.raises(Unavailable):
        served.submit(Request(prompt=(1,)))


def test_who_comes_while_it_closes_is_answered(model):
    """Between the look at whether it is open and the inbox it closes: nobody may wait for what nobody takes in."""
    served = Engine(model, num_pages=120, hash_unit=64)
    served.start()
    look, closer = served.scheduler.check, threading.Thread(target=served.close)
    served.scheduler.check = lambda *given: (look(*given), closer.start(), closer.join(timeout=0.1))
    handle = served.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=1000)))
    assert list(handle)[-1].reason == "abort"
    closer.join(timeout=10)
    assert not served._handles and served._inbox.empty() and not closer.is_alive()
    with pytest.raises(Unavailable):
        served.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=1000)))


def test_weights_that_come_while_it_ends_are_taken(model):
    """The thread has ended and will not look into the inbox again; the one who waits does."""
    served = Engine(model, num_pages=120, hash_unit=64)
    served.start()
    post = served._post

    def late(action):
        served._closing = True
        served._wake.set()
        served._thread.join()
        post(action)

    served._post = late
    served.update_weights([], 1)
    assert served.version == 1


def test_deadlines_and_full_queues(model):
    served = Engine(model, num_pages=120, hash_unit=64, max_running=1, max_queued=1)
    late = served.submit(Request(prompt=prompt(20), params=SamplingParams(max_tokens=5000), deadline_s=0.3))
    served.step()
    served.submit(Request(prompt=prompt(5), params=SamplingParams(max_tokens=2)))
    with pytest.raises(QueueFull) as refused:
        served.submit(Request(prompt=prompt(5)))
    assert refused.value.retry_after_s >= 1
    *_, last = late
    assert last.reason == "abort" and "deadline" in last.error


def test_the_queue_is_as_long_for_those_who_come_at_once(model):
    served = Engine(model, num_pages=120, hash_unit=64, max_running=2, max_queued=3)
    request = Request(prompt=prompt(5), params=SamplingParams(max_tokens=2))
    together, taken, before = threading.Barrier(12), [], sys.getswitchinterval()

    def come():
        together.wait()
        with suppress(QueueFull):
            taken.append(served.submit(request))

    threads = [threading.Thread(target=come) for _ in range(12)]
    sys.setswitchinterval(1e-6)  # threads change places between any two lines
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(taken) == 3 and served.stats().refused == 9
    assert all(list(handle)[-1].reason == "length" for handle in taken)


def test_an_id_is_used_once_at_a_time(model):
    served = Engine(model, num_pages=120, hash_unit=64)
    request = Request(prompt=prompt(5), params=SamplingParams(max_tokens=2), id="same")
    handle = served.submit(request)
    with pytest.raises(ValueError, match="'same' is in use"):
        served.submit(request)
    list(handle)
    list(served.submit(request))


def test_words_that_the_tokenizer_lacks_have_no_text(model):
    few = train_tokenizer(["some text"], 300, note=lambda text: None)
    served = Engine(model, tokenizer=few, num_pages=120, hash_unit=64)
    bias = {310: 1000.0, few.encode("s")[0]: 999.9}
    [[one]] = served.generate([[1]], SamplingParams(max_tokens=30, temperature=1.0, seed=1, logit_bias=bias))
    assert set(one.text) == {"s", "\ufffd"} and one.text.count("\ufffd") == one.tokens.count(310)


def test_weights_change_between_steps_of_the_thread(model):
    served = Engine(lively_model(), num_pages=120, hash_unit=64)
    served.start()
    other = new_model(MODEL.replace(init_std=0.2), seed=8)
    served.update_weights(other.named_parameters(), 2)
    [[one]] = served.generate([prompt(20)], SamplingParams(max_tokens=6, temperature=0))
    served.close()
    assert one.tokens == alone(other, prompt(20), 6) and one.versions == (2,) * 6


def test_weights_at_which_the_thread_fails_are_not_said_to_be_there(monkeypatch):
    served = Engine(lively_model(), num_pages=60, hash_unit=64)
    monkeypatch.setattr(served.model, "prepare", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    served.start()
    with pytest.raises(OSError, match="stopped with a part of them"):
        served.update_weights(served.model.named_parameters(), 1)


def test_of_weights_with_one_number_one_is_taken():
    """Both came before either was there: chains of the one would match the other."""
    served = Engine(lively_model(), num_pages=60, hash_unit=64)
    together, refused = threading.Barrier(4), []

    def come():
        together.wait()
        try:
            served.update_weights(served.model.named_parameters(), 3)
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=come) for _ in range(4)]
    with served._stepping:  # nobody gets on before all have looked
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while len(refused) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert len(refused) == 3 and "version is 3" in refused[0] and served.version == 3


def test_after_a_fault_nobody_waits(model):
    """The thread dies of an error in the model: open requests end, new ones are refused."""
    served = Engine(model, num_pages=120, hash_unit=64)
    served.runner.run = lambda parts, with_experts: 1 / 0
    caught = []
    hook, threading.excepthook = threading.excepthook, lambda arguments: caught.append(arguments.exc_type)
    try:
        served.start()
        (last,) = served.submit(Request(prompt=prompt(20), params=SamplingParams(max_tokens=5)))
        served._thread.join(timeout=10)
    finally:
        threading.excepthook = hook
    assert last.reason == "error" and "after a fault" in last.error and caught == [ZeroDivisionError]
    with pytest.raises(Unavailable):
        served.submit(Request(prompt=(1,)))


def test_two_hundred_at_once_with_random_aborts(model):
    """Everything is answered, what is answered is right, all memory comes back."""
    served = Engine(model, num_pages=90, hash_unit=64, max_running=48, token_budget=256, drafter="ngram", poison=True)
    draws = random.Random(1)
    prompts = [prompt(draws.randrange(1, 120), seed=n % 20) for n in range(200)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    handles = [served.submit(Request(prompt=ids, params=params)) for ids in prompts]
    while served.step():
        if draws.random() < 0.5:
            served.abort(draws.choice(handles).id)
    reasons = []
    for ids, handle in zip(prompts, handles, strict=True):
        *tokens, last = handle
        reasons.append(last.reason)
        assert tuple(output.token for output in tokens) == known(model, tuple(ids))[: len(tokens)]
    assert reasons.count("length") > 100 and reasons.count("abort") > 5
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 90 and served._handles == {}


@cache
def known(model, ids):
    return alone(model, list(ids), 10)


# --- pictures ---

MEDIA = 90
SEEING = preset("tiny").replace(
    vocab_size=97,
    hidden_size=32,
    num_layers=3,
    mla_layers=(1,),
    num_experts=4,
    active_experts=2,
    media_pad_id=MEDIA,
    eos_id=None,
    init_std=0.2,
    vision=VisionConfig(
        text_width=32, patch_size=4, width=12, num_layers=1, num_heads=3, qkv_width=12, mlp_width=20, table_height=5
    ),
)


def pictures(seed, grids=((1, 4, 4), (1, 2, 6))):
    noise = np.random.default_rng(seed)
    patches = noise.standard_normal((sum(t * h * w for t, h, w in grids), 3, 4, 4)).astype(np.float32)
    digests = tuple(f"{seed * 16 + n:064x}" for n in range(len(grids)))
    return Images(patches, np.array(grids), sizes=((8, 8),) * len(grids), digests=digests)


def test_pictures_are_seen_in_every_chunk_and_count_by_their_digest():
    model = new_model(SEEING, seed=2)
    one, two = pictures(1), pictures(2)
    ids = [*range(40), MEDIA, *range(50), MEDIA, *range(60)]
    want = [tuple(generate(model, torch.tensor(ids), 10, images=images).tolist()) for images in (one, two)]
    assert want[0] != want[1]
    expanded = expand_media(ids, one.grids, media_id=MEDIA)
    served = Engine(model, num_pages=100, hash_unit=64, token_budget=64, max_running=8, poison=True)
    cached = []
    for turn in range(6):
        params = SamplingParams(max_tokens=10, temperature=0)
        handle = served.submit(Request(prompt=expanded, params=params, images=[(one, two)[turn % 2]]))
        *tokens, last = handle
        assert tuple(output.token for output in tokens) == want[turn % 2]
        cached.append(last.usage.cached_tokens)
    assert cached == [0, 0, *[len(expanded) - 1] * 4], cached
    with pytest.raises(ValueError, match="7 rows of features, the prompt 2 media tokens"):
        served.submit(Request(prompt=ids, images=[one]))
