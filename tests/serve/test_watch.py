"""Looks at who promises nothing become rare, one by one, and frequent again where something came true."""

from types import SimpleNamespace

import pytest

from rille.serve.chain import Chain
from rille.serve.schema import Request
from rille.serve.sequences import Sequence
from rille.serve.watch import Watch


def sequences(count):
    made = [Sequence(Request(prompt=(1, 2)), "one", 0, n, Chain((1, 2), 64), "short") for n in range(count)]
    for one in made:
        one.holding = SimpleNamespace(length=1)
    return made


def looks(watch, steps, after):
    """Of each step how many are due; `after` says of each what follows."""
    counts = []
    for _ in range(steps):
        due = watch.due()
        for one in due:
            after(one)
        counts.append(len(due))
    return counts


@pytest.mark.parametrize("count", [1, 8, 64, 200])
def test_together_about_one_look_a_step(count):
    watch = Watch()
    watch.enter(sequences(count))
    counts = looks(watch, 600, watch.later)
    assert counts[0] == count and sum(counts[200:]) <= 1.5 * 400 * max(1, count / 64)
    assert max(counts[200:]) <= max(8, count // 4)  # not all of them in one step
    if count == 1:
        assert counts == [1] * 600


def test_waits_grow_and_begin_anew():
    watch, (one, *others) = Watch(), sequences(100)
    watch.enter([one, *others])
    for other in others:
        other.holding = None  # set aside: forgotten when its turn comes
    assert watch.due() == [one] and len(watch._gaps) == 1
    watch.enter(others)
    watch.later(one)

    def waited():
        return next(step for step in range(1, 200) if one in watch.due())

    gaps = []
    for _ in range(9):
        gaps.append(waited())
        watch.later(one)
    assert gaps[0] == 1 and len(watch._gaps) == 1 == max(gaps)  # alone: always
    watch.enter(sequences(100))
    gaps = []
    for _ in range(9):
        gaps.append(waited())
        watch.later(one)
    assert gaps[:1] == [1] and gaps == sorted(gaps) and gaps[-1] == Watch.LATEST
    waited()
    assert watch.rests(one) and waited() == Watch.LATEST
    watch.trust(one)
    assert not watch.rests(one)  # a first failure is forgiven
    watch.soon(one)
    assert waited() == 1 and watch.rests(one) and waited() == 2
    watch.forget(one)
    watch.trust(one)
    assert one not in watch._gaps


def test_rounds_become_rare_where_nothing_is_worth_a_run():
    """Of 64 one in eight has a guess all the time and it never pays: they are looked up together, now and then."""
    watch, every = Watch(), sequences(64)
    watch.enter(every)

    def round_of(steps, worth):
        counts = []
        for _ in range(steps):
            due = watch.due()
            counts.append(len(due))
            for one in due:
                (watch.soon if one.order % 8 == 0 else watch.later)(one)
            if due:
                (watch.go_on if worth else watch.pause)()
        return counts

    counts = round_of(600, worth=False)
    assert counts[0] == 64 and min(counts[1:6]) >= 8  # at first before every step
    rounds = [step for step, count in enumerate(counts) if count]
    gaps = [b - a for a, b in zip(rounds, rounds[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] == Watch.LONGEST
    assert all(count >= 8 for count in counts if count)  # those with a guess, all of them, in every round
    assert sum(counts[300:]) <= 1.5 * 300
    assert all(round_of(200, worth=True)[Watch.LONGEST :])  # before every step again
    few = Watch()
    few.enter(sequences(1))
    for _ in range(300):
        (one,) = few.due()
        few.later(one)
        few.pause()
