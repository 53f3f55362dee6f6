"""Steps with prompts in fixed shapes against steps as they come."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from rille.model.model import new_model
from rille.model.presets import preset
from rille.serve import prompts as prompts_module
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.padded import Shape
from rille.serve.prompts import PromptGraphs
from rille.serve.schema import Request, SamplingParams
from tests.serve.beds import ALONE, FRESH, FULL, GREEDY, LATER, MIXED, Bed, Piece, assert_near
from tests.serve.test_engine import Scripted, alone, prompt
from tests.serve.test_graphs import all_active
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL.replace(init_std=0.2), seed=3)


@pytest.mark.parametrize("pieces", [MIXED, FRESH, ALONE, FULL, LATER, MIXED[:1] * 30 + MIXED], ids="MFAULX")
def test_the_padded_form_changes_nothing(model, pieces):
    """Logits, states, tails, latents and kept states; what nobody owns holds NaN and stays out."""
    bed = Bed(model, pieces, spares=150)
    want, want_pages = bed.run(None)
    got, got_pages = bed.run(bed.graphs(captures=False))
    assert len(got) == sum(piece.ends for piece in pieces) and want.isfinite().all()
    assert_near(got, want, rtol=1e-4, atol=1e-4)
    assert_near(got_pages, want_pages, rtol=1e-4, atol=1e-5)
    untouched = (want_pages == bed.begun[150:]).all(1)
    assert torch.equal((got_pages == bed.begun[150:]).all(1), untouched) and untouched.any()


@pytest.mark.parametrize("saves", [0, 4])
def test_a_step_of_nobody_touches_nobody(model, saves):
    """What runs before a shape is recorded."""
    bed = Bed(model, MIXED, spares=12)
    graphs = bed.graphs(captures=False)
    slate = graphs._new_slate(Shape(128, 4, 8, saves))
    with torch.inference_mode():
        graphs._forward(slate, graphs._fill(slate, []))
    assert torch.equal(bed.pages.bytes[12:], bed.begun[12:]) and not torch.equal(bed.pages.bytes, bed.begun)


# --- in an engine ---


def with_prompts(model, **settings):
    """An engine whose steps all run in their padded form, and how many did."""
    served = Engine(model, **{"num_pages": 300, "hash_unit": 64, "poison": True, **settings})
    spares = served.scheduler.cache.store.allocate(100)
    served.scheduler.cache.reserved = 100
    served.runner.prompts = prompts = PromptGraphs(model, served.pages, spares, served.longest, 20, 0, captures=False)
    taken, run = Counter(), prompts.run

    def counting(parts):
        logits = run(parts)
        taken[logits is not None] += 1
        return logits

    prompts.run = counting
    return served, taken


@pytest.mark.parametrize(
    "settings", [{}, {"token_budget": 90}, {"checkpoint_interval": 64}, {"exact_ends": False}, {"max_running": 3}]
)
def test_an_engine_writes_what_each_would_alone(model, settings):
    served, taken = with_prompts(model, **settings)
    prompts = [prompt(n, seed=n) for n in (1, 2, 63, 64, 150, 320, 90, 200)]
    for turn in range(3):  # then from the cache, and further
        results = served.generate(prompts, GREEDY)
        for ids, (one,) in zip(prompts, results, strict=True):
            assert one.tokens == alone(model, ids, 12) and (turn == 0 or one.usage.cached_tokens or len(ids) < 66)
        prompts = [ids + list(one.tokens) + prompt(7, seed=turn) for ids, (one,) in zip(prompts, results, strict=True)]
    assert taken[True] > 20 and not taken[False]
    audit_scheduler(served.scheduler)


def test_what_a_recorded_step_cannot_give_runs_op_by_op(model):
    """Experts that are asked for, drafts on copies of states, and more than there are shapes for."""
    served, taken = with_prompts(model, drafter=Scripted(model), adaptive_drafts=False)
    list(served.submit(Request(prompt=prompt(70), params=replace(GREEDY, expert_ids=True))))
    assert not taken[True]
    handle = served.submit(Request(prompt=prompt(40, seed=1), params=replace(GREEDY, max_tokens=40)))
    for _ in range(4):  # one writes, with guesses, when another one comes
        served.step()
    [[other]] = served.generate([prompt(90, seed=2)], GREEDY)
    assert other.tokens == alone(model, prompt(90, seed=2), 12)
    assert [out.token for out in list(handle)[:-1]] == list(alone(model, prompt(40, seed=1), 40))
    assert taken[True] and taken[False] and served.stats().accepted
    large = Bed(model, [Piece(0, 8193)], spares=20)
    assert large.graphs(captures=False)._shape(large.parts) is None


def test_shapes_that_there_is_no_room_for_are_told(model, monkeypatch):
    """A step runs op by op, and the first that does so for good says why."""
    monkeypatch.setattr(prompts_module, "MOST_RECORDED", 1)
    graphs, (first, second) = Bed(model, [Piece(0, 5)]).graphs(captures=True), (Shape(n, 4, 4, 0) for n in (64, 128))
    monkeypatch.setattr(graphs, "_record", lambda shape: f"recorded {shape.tokens}")
    assert [graphs._recording(first) for _ in range(3)] == [None, "recorded 64", "recorded 64"]
    assert graphs._recording(second) is None
    with pytest.warns(UserWarning, match="1 shapes of steps with prompts are recorded; steps of others run op by op"):
        assert graphs._recording(second) is None
    assert graphs._recording(second) is None and graphs._recording(first) == "recorded 64"


# --- on a GPU ---


def shallow():
    """Of real widths, and shallow, so that rounding stays small beside a token; all experts are reached."""
    few = preset("nano").replace(num_layers=4, mla_layers=(3,), num_experts=6, init_std=0.1)
    return new_model(few, dtype=torch.bfloat16, device="cuda", seed=1)


# All of one shape: 512 tokens, 16 rows, up to 16 saves.
STEPS = (
    MIXED,
    (Piece(1000, 1), *ALONE),
    (Piece(300, 200, (20, 84, 199)), Piece(63, 1), Piece(0, 99), Piece(64, 100, (64,), ends=False)),
    (Piece(5, 13), Piece(448, 256, (64,))),
)


def together(model):
    """The steps' sequences in one set of pages, with numbers of their own."""
    bed = Bed(model, [piece for pieces in STEPS for piece in pieces])
    parts, rest = [], bed.parts
    for pieces in STEPS:
        parts.append(rest[: len(pieces)])
        rest = rest[len(pieces) :]
    return bed, parts


@pytest.mark.gpu
def test_a_recorded_step_has_the_bits_of_its_ops(monkeypatch):
    """Steps that differ in all but the shape, one after another through one recording, against the padded form op by
    op: logits, and every page that belongs to somebody."""
    monkeypatch.setattr(prompts_module, "TOKENS", (512,))
    monkeypatch.setattr(prompts_module, "ROWS", (16,))
    monkeypatch.setattr(prompts_module, "SAVES", (16,))
    bed, steps = together(shallow())
    recorded, by_op = bed.graphs(), bed.graphs(captures=False)
    want = []
    for bed.parts in steps:
        want.append(bed.run(by_op))
    for turn in (0, 0, 1, 2, 3, 2, 0, 1):  # the first one runs as it comes
        bed.parts = steps[turn]
        got, pages = bed.run(recorded)
        if recorded._recorded:
            assert torch.equal(got, want[turn][0]) and torch.equal(pages, want[turn][1]), turn
    assert len(recorded._recorded) == 1 and not recorded._refused
    assert not torch.equal(want[0][1], want[1][1])


def distance(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_recorded_step_is_near_the_step_as_it_comes(step):
    """Other numbers of rows round otherwise: logits, and states, tails and latents of all that ran."""
    bed, steps = together(shallow())
    bed.parts, recorded = steps[step], bed.graphs()
    want, want_pages = bed.run(None)
    bed.run(recorded)
    got, got_pages = bed.run(recorded)
    assert recorded._recorded and want.isfinite().all() and distance(got, want) < 0.03
    kept = [pages for part in bed.parts for _, pages in part.saves]
    own = [[part.sequence.holding.state for part in bed.parts], kept]
    for layer, pool in (*bed.pages.states.items(), *bed.pages.tails.items()):
        slots = [some[bed.pages.group_of[layer]] for kind in own for some in kind]
        bed.pages.bytes[1:] = want_pages
        states = pool[slots].clone()
        bed.pages.bytes[1:] = got_pages
        for slot, state in zip(slots, states, strict=True):
            assert distance(pool[slot], state) < 0.03, (layer, slot)
    used = {page for part in bed.parts for page in part.sequence.holding.state}
    used |= {page for pages in kept for page in pages}
    used |= {entry.pages[0] for part in bed.parts for entry in part.sequence.holding.latents}
    others = torch.tensor([page - 1 for page in range(1, 400) if page not in used], device="cuda")
    assert torch.equal(got_pages[others], bed.begun[1:][others])


def replies(model, records, drafter="none"):
    """Three turns of eight sessions that come one after another while others write, the later turns from the cache;
    and what was recorded."""
    settings = dict(num_pages=300, hash_unit=64, checkpoint_interval=128)
    served = Engine(model, **settings, drafter=drafter, recorded_prompts=records)
    params, results = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), []
    for turn in range(3):
        handles = []
        for n, length in enumerate((5, 63, 64, 300, 777, 128, 1200, 31)):
            ids = [*prompt(length, seed=n), *prompt(70 * turn + n * (turn > 0), seed=100 + n)]
            handles.append(served.submit(Request(prompt=ids, params=params)))
            served.step()
            served.step()
        results += [list(handle) for handle in handles]
    audit_scheduler(served.scheduler)
    return results, served.runner.prompts


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_an_engine_that_records_agrees_with_one_that_does_not(drafter):
    """Of 24 tokens as many as rounding lets agree; up to there the figures are near (the bound of recorded drafts)."""
    model = new_model(all_active(), dtype=torch.bfloat16, device="cuda", seed=1)
    want, nothing = replies(model, False, drafter)
    results, recorded = replies(model, True, drafter)
    assert nothing is None and len(recorded._recorded) >= 3 and not recorded._refused
    agreed = []
    for (*some, last), (*others, end) in zip(results, want, strict=True):
        assert last.usage == end.usage and some[0].logprob == pytest.approx(others[0].logprob, abs=0.35)
        agreed.append(next((n for n, (a, b) in enumerate(zip(some, others, strict=True)) if a.token != b.token), 24))
        first = [[one.logprob for one in each[: agreed[-1]]] for each in (some, others)]
        assert first[0] == pytest.approx(first[1], abs=0.35)
    print("agreed", agreed, "shapes", list(recorded._recorded))
    assert sum(agreed) > len(agreed) * 24 // 3


@pytest.mark.gpu
def test_a_model_whose_ops_ask_the_host_is_not_recorded():
    """In fp32 latents are read by PyTorch, which goes by the host's lengths."""
    model = new_model(MODEL.replace(init_std=0.2), device="cuda", seed=3)
    with pytest.warns(UserWarning, match="op by op, not recorded: .*fp16"):
        served = Engine(model, num_pages=100, hash_unit=64)
    prompts = [prompt(n, seed=n) for n in (5, 64, 150)]
    results = served.generate(prompts, GREEDY)
    assert [one.tokens for (one,) in results] == [alone(model, ids, 12) for ids in prompts]
    assert served.runner.graphs is None and served.runner.prompts is None
