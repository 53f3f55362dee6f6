"""Whether tokens are guessed, and how many, follows what came true and what it cost."""

import random

import pytest

from rille.serve.chain import Chain
from rille.serve.odds import Line, Odds
from rille.serve.schema import Request
from rille.serve.sequences import Sequence


def sequence(ids=(1, 2, 3)):
    return Sequence(Request(prompt=tuple(ids)), "one", 0, 1, Chain(ids, 64), "short")


def timed(most=4, plain=10.0, token=1.0, **rest):
    """A step costs 10 and each token of it 1."""
    odds = Odds(most, **rest)
    for rows in (1, 2, 5, 20, 80):
        for _ in range(20):
            odds.note_time(rows, rows, plain + token * rows)
            odds.note_time(rows, 5 * rows, plain + token * 5 * rows)
    return odds


def test_drafts_stop_where_they_do_not_pay():
    """With one sequence a guess that often comes true pays, with many none."""

    def settled(rate, rows):
        odds, one, draws = timed(), sequence(), random.Random(0)
        for _ in range(400):
            place = 0
            while place < 4 and draws.random() < rate:
                place += 1
            odds.note(one, 4, place)
        odds._rates.clear()
        return odds.choose(rows, [one] * rows)

    assert settled(0.98, 1) == 4
    assert settled(0.9, 200) == 0
    assert settled(0.02, 1) == 0
    assert 1 <= settled(0.7, 1) <= 4


def test_one_guess_of_many_is_not_worth_a_step():
    odds, some = timed(plain=10.0, token=0.1), [sequence() for _ in range(64)]
    for one in some:
        for _ in range(9):
            odds.note(one, 4, 4)
    assert odds.choose(64, some[:2]) == 0 < odds.choose(64, some)
    assert odds.choose(64, []) == 0
    odds.padded = True  # then the two cost as much as all
    assert odds.choose(64, some[:6]) == 0 < odds.choose(64, some)


def test_bets_cost_nothing_and_teach_as_much():
    """Guesses that are not run are compared with what came: up to the first that did not."""
    odds, one = timed(), sequence()
    for tokens, came, seen in (((7, 8, 9), (7, 8, 9), 3), ((7, 8, 9), (7, 5), 1), ((4,), (5,), 0)):
        run, rate = Odds(4), odds.rate(one)
        run._rates[one] = rate
        run.note(one, len(tokens), seen)
        odds.bet(one, tokens)
        odds.bet(one, (1, 1, 1))  # while one is open there is no other
        for token in came:
            odds.settle(one)
            one.chain.append(token)
        odds.settle(one)
        assert odds.rate(one) == pytest.approx(run.rate(one)) and not odds._bets
    odds.bet(one, (3, 4))
    odds.note(one, 2, 2)  # it was run
    assert not odds._bets
    odds.forget(one)
    assert odds.rate(one) == odds.overall


def test_a_repetition_is_believed_soon_and_left_soon():
    odds, one = timed(plain=4.0, token=1.5), sequence()
    odds.overall = 0.1
    right = 0
    while not odds.choose(1, [one]):
        odds.note(one, 4, 4)
        right += 1
    for _ in range(5):
        odds.note(one, 4, 4)
    wrong = 0
    while odds.choose(1, [one]):
        odds.note(one, 4, 0)
        wrong += 1
    assert right == 1 and wrong <= 4


def test_luck_is_no_rate():
    """Guesses that come true every other time look good three times in a row; soon that is not believed any more."""
    odds, one, draws = timed(plain=5.0, token=5.0), sequence(), random.Random(3)
    runs = []
    for _ in range(2000):
        limit = odds.choose(1, [one])
        runs.append(limit > 0)
        odds.bet(one, (1, 1, 1, 1))
        one.chain.append(int(draws.random() < 0.5))
        odds.settle(one)
    assert sum(runs[200:]) < 20
    for _ in range(40):
        odds.bet(one, (1, 1, 1, 1))
        one.chain.append(1)
        odds.settle(one)
    assert odds.choose(1, [one]) == 4


def test_dear_drafts_are_tried_again_now_and_then():
    odds, one = timed(), sequence()
    odds._rates[one] = odds.overall = 0.0
    chosen = [odds.choose_dear([one]) for _ in range(10_000)]
    tried = [step for step, length in enumerate(chosen, 1) if length]
    assert tried == [64, 192, 448, 960, 1984, 4032, 8128] and max(chosen) == 1
    while not odds.choose_dear([one]):
        pass
    odds.note(one, 1, 1)
    assert odds.rate(one) >= 0.5
    assert odds.choose_dear([]) == 0 and Odds(4, fixed=True).choose_dear([one] * 1000) == 4


@pytest.mark.parametrize("slow, fewest, most", [(2.0, 4900, 4937), (20.0, 5, 9)])
def test_what_was_too_slow_is_measured_again(slow, fewest, most):
    """Every guess comes true. A step with guesses takes `slow` times as long as one without, the first one, which
    compiles, 5,000 times. It runs twice: once to be measured, and once after it was looked ahead."""
    odds, one, ran = Odds(4), sequence(), 0
    for _ in range(5000):
        if odds.choose(1, [one]) and odds.choose(1, [one]):
            odds.note(one, 4, 4)
            odds.note_time(1, 5, slow if ran else 5000.0)
            ran += 1
        else:
            odds.bet(one, (7,))
            one.chain.append(7)
            odds.settle(one)
            odds.note_time(1, 1, 1.0)
    assert fewest <= ran <= most


def test_a_line_through_what_was_measured():
    line = Line()
    assert line.at(3) is None
    line.note(4, 8.0)
    assert line.at(1) == line.at(100) == 8.0
    line.note(8, 12.0)
    assert line.at(6) == pytest.approx(10, abs=0.1) and line.at(16) == pytest.approx(20, abs=0.3)
    assert line.at(-100) > 0
    line.note(8, 1e6)  # a pause of something else
    assert line.at(8) < 4 * 12
