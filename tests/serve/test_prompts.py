"""Steps with prompts in fixed shapes against steps as they come."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count as counted

import numpy as np
import pytest
import torch

from rille.model.model import new_model
from rille.model.presets import preset
from rille.ops.conv import PooledTail, TailPlaces, short_conv
from rille.ops.kda import Gate, PooledState, cutting, kda
from rille.ops.mla import LatentCache, latent_attention, store_rows
from rille.packing import Packing
from rille.serve import assemble
from rille.serve import prompts as prompts_module
from rille.serve.audit import audit_scheduler
from rille.serve.chain import Chain
from rille.serve.engine import Engine
from rille.serve.holding import Holding
from rille.serve.padded import Form, Numbers, Shape, Sheet
from rille.serve.paged import Pages
from rille.serve.prompts import PromptGraphs, Slate
from rille.serve.runner import Runner
from rille.serve.schema import Request, SamplingParams
from rille.serve.sequences import Part, Sequence
from rille.serve.store import Entry
from tests.serve.test_engine import Scripted, alone, prompt
from tests.serve.test_graphs import all_active
from tests.train.small import MODEL

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@dataclass(frozen=True)
class Piece:
    """A part to be: tokens that went before, tokens of it, places inside at which states are kept, whether the prompt
    ends with it."""

    before: int
    count: int
    saves: tuple[int, ...] = ()
    ends: bool = True


# One token of somebody who writes, prompts of odd lengths, one that goes on from the middle of a chunk, one token of a
# longer prompt; places at the ends of chunks, inside, in one chunk together, at the very first and last token.
MIXED = (
    Piece(100, 1),
    Piece(0, 150, (1, 2, 64, 91, 128, 149)),
    Piece(37, 70, (5, 69)),
    Piece(64, 65, (64,), ends=False),
    Piece(200, 1),
    Piece(12, 1, ends=False),
)
FRESH = (Piece(0, 129, (128,)), Piece(0, 64), Piece(0, 3))
ALONE = (Piece(0, 500, (448,)),)
FULL = (Piece(0, 100, (64,)), Piece(9, 100), Piece(70, 1), Piece(0, 55))  # 256 tokens, 4 rows: nothing is left over
LATER = (Piece(249, 90, (71,)), Piece(3, 1))


class Bed:
    """Sequences in poisoned pages, each ready for its piece; `spares` pages belong to nobody."""

    def __init__(self, model, pieces, spares=1, seed=0):
        c, free = model.config, counted()
        self.pages = Pages(c, 400, model.dtype, model.device, poison=True)
        self.runner, layout = Runner(model, self.pages), self.pages.layout
        self.spares = [next(free) for _ in range(spares)]
        self.parts, begun = [], []
        for n, piece in enumerate(pieces):
            length = piece.before + piece.count + (not piece.ends)
            chain = Chain(prompt(length, seed=seed + n), 64)
            latents = [Entry((next(free),), 0) for _ in range(-(-length // layout.page_tokens))]
            holding = Holding(chain, latents=latents, state=tuple(next(free) for _ in range(layout.groups)))
            sequence = Sequence(Request(prompt=chain.ids, params=GREEDY), str(n), 0, n, chain, "", holding=holding)
            saves = tuple((piece.before + at, tuple(next(free) for _ in range(layout.groups))) for at in piece.saves)
            self.pages.clear(holding.state)
            self.parts.append(Part(sequence, piece.before, piece.count, saves=saves))
            begun += [Part(sequence, 0, piece.before)] if piece.before else []
        if begun:
            self.runner.run(begun)
        self.begun = self.pages.bytes.clone()

    def graphs(self, **options):
        return PromptGraphs(self.runner.model, self.pages, self.spares, 4096, 64, 2**33, **options)

    def run(self, prompts):
        """Logits, and all pages that belong to somebody, from the same beginning."""
        self.pages.bytes.copy_(self.begun)
        self.runner.prompts = prompts
        logits_RW = self.runner.run(self.parts).logits.clone()
        return logits_RW, self.pages.bytes[len(self.spares) :].clone()


def assert_near(got, want, dtype=torch.float32, **close):
    """Floats that are near, and no number in the same places."""
    torch.testing.assert_close(got.view(dtype), want.view(dtype), equal_nan=True, **close)


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


def as_first(some, full):
    """Numbers that an array begins with, and the others."""
    return full[: len(some)].tolist() == np.asarray(some).tolist(), full[len(some) :]


@pytest.mark.parametrize("pieces", [MIXED, FRESH, ALONE, LATER])
def test_the_numbers_are_those_of_the_step(model, pieces):
    """What the buffer says of a step is what `Packing` says of it, with the padding as one more sequence."""
    bed, shape = Bed(model, pieces, spares=2), Shape(1024, 16, 20, 16)
    form = Form(shape, bed.pages.layout.groups, bed.pages.conv_width)
    sheet, n = Sheet(form, bed.parts, bed.spares), len(pieces)
    of, S, M = sheet.of, shape.sequences, shape.chunks
    idle, left = [0] * (S - n - 1), 1024 - sum(piece.count for piece in pieces)
    true = Packing.of([*(p.count for p in pieces), *idle, left], [*(p.before for p in pieces), *idle, 0])
    assert sheet.numbers.lengths == true.lengths and sheet.numbers.consumed[:n] == true.consumed[:n]
    chunks = true.chunks(64)
    same = dict(starts=true.starts, history=true.history, sequence_of=true.sequence_of, positions=true.positions)
    same |= dict(order=true.longest_first, first=chunks.first)
    for name, want in same.items():
        assert of[name].tolist() == want.tolist(), name
    begins, rest = as_first(chunks.spans, of["spans"][:M])
    assert begins and not rest.any() and sheet.numbers.per_sequence == chunks.per_sequence
    ids = [i for part in bed.parts for i in part.sequence.chain.ids[part.start : part.start + part.count]]
    begins, rest = as_first(ids, of["tokens"])
    assert begins and not rest.any()
    members = [of[name][of[name] != S - 2].tolist() for name in ("singles", "others")]
    assert sorted(sum(members, [])) == [*range(n), S - 1] and all(true.lengths[s] == 1 for s in members[0])
    assert set(of["slots"][:, n:].flatten()) == set(bed.spares) and set(of["table"][n:].flatten()) == {bed.spares[0]}
    for row, part in enumerate(bed.parts):
        pages = [entry.pages[0] for entry in part.sequence.holding.latents]
        assert of["table"][row, : len(pages)].tolist() == pages
        assert of["slots"][:, row].tolist() == list(part.sequence.holding.state)
    device = form.tensors(sheet.buffer)
    assert all(np.array_equal(device[name], of[name]) and device[name].data_ptr() % 16 == 0 for name in of)


@pytest.mark.parametrize("shape", [Shape(64, 4, 4, 0), Shape(2048, 64, 16, 4)])
def test_bounds_fit_the_shape(shape):
    bounds = Numbers.bounds(shape)
    assert sum(bounds.lengths) == shape.tokens and len(bounds.lengths) == shape.sequences == len(bounds.consumed)
    assert any(bounds.consumed) and sum(bounds.rest) == shape.between


@pytest.mark.parametrize("lengths", [[1] * 64, [65] * 15, [127, 1, 1, 63], [64] * 4, [2]])
def test_a_shape_has_room_for_all_chunks(lengths):
    """Whatever the padding is."""
    for tokens in (1024, -(-sum(lengths) // 64) * 64):
        every = [*lengths, tokens - sum(lengths)]
        assert sum(-(-n // 64) for n in every) <= Shape(tokens, len(lengths), 4, 0).chunks


class Kernels:
    """The ops that know a batch by its sequences, with random operands and pools, in Triton's interpreter."""

    def __init__(self, slate, pages):
        generator, N = torch.Generator().manual_seed(1), slate.form.shape.tokens
        self.slate, self.pages = slate, pages
        self.draw = lambda *sizes: torch.randn(sizes, generator=generator)
        self.q, self.k, self.v, self.z = (self.draw(N, 1, 64) for _ in range(4))
        self.b, self.x, self.both, self.queries = (
            self.draw(N, 1),
            self.draw(N, 5),
            self.draw(N, 48),
            self.draw(N, 2, 48),
        )
        self.weight, self.gain, self.gate = self.draw(5, 4), self.draw(32), Gate(self.draw(1), self.draw(1, 64), -5.0)
        self.pools = self.draw(pages, 1, 64, 64), self.draw(pages, 3, 5), self.draw(pages, 64, 48)

    def run(self, numbers):
        """Outputs and pools. numbers: of the step, or bounds."""
        of, packing, places = self.slate.of, self.slate.packing(numbers), self.slate.places(numbers)
        states, tails, latents = (pool.clone() for pool in self.pools)
        slots, kept, way = of["slots"][0], of["kept"][0], dict(backend="triton")
        tail = PooledTail(tails, slots, TailPlaces(of["tail_rows"], of["tail_sequences"]), kept)
        y, _ = short_conv(self.x, self.weight, packing, tail, **way)
        state, cache = PooledState(states, slots, *places.at(slots, kept)), LatentCache(latents, of["table"])
        with torch.no_grad(), cutting(None):
            o, _ = kda(self.q, self.k, self.v, self.z, self.b, self.gate, packing, state, **way)
        store_rows(self.both, self.gain, 1e-5, cache, packing, **way)
        mixed = latent_attention(self.queries, cache, packing, 0.1, 32, **way)
        return [y, o, mixed], [states, tails, latents]


def test_kernels_read_lengths_on_the_device(model):
    """What the host takes for the lengths changes no bit of what belongs to somebody."""
    pieces = Piece(70, 1), Piece(3, 66, (2, 64)), Piece(64, 20, (20,), ends=False)
    bed = Bed(model, pieces, spares=12)
    slate = Slate.new(Form(Shape(128, 4, 8, 4), bed.pages.layout.groups, 4), torch.device("cpu"))
    sheet = Sheet(slate.form, bed.parts, bed.spares)
    slate.buffer.copy_(sheet.buffer)
    kernels, count = Kernels(slate, 400), sum(piece.count for piece in pieces)
    (want, pools), (got, others) = kernels.run(sheet.numbers), kernels.run(Numbers.bounds(slate.form.shape))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[:count], theirs[:count]) and theirs[:count].isfinite().all()
    for mine, theirs, before in zip(others, pools, kernels.pools, strict=True):
        assert_near(mine[12:], theirs[12:], rtol=0, atol=0)
        assert not torch.equal(theirs[12:].nan_to_num(), before[12:].nan_to_num())


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
    large = Bed(model, [Piece(0, 4097)], spares=20)
    assert large.graphs(captures=False)._shape(large.parts) is None


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


def replies(model, monkeypatch, records, drafter="none"):
    """Three turns of eight sessions that come one after another while others write, the later turns from the cache;
    and what was recorded."""
    monkeypatch.setattr(assemble, "RECORDS_PROMPTS", records)
    served = Engine(model, num_pages=300, hash_unit=64, checkpoint_interval=128, drafter=drafter)
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
def test_an_engine_that_records_agrees_with_one_that_does_not(monkeypatch, drafter):
    """Of 24 tokens as many as rounding lets agree; up to there the figures are near (the bound of recorded drafts)."""
    model = new_model(all_active(), dtype=torch.bfloat16, device="cuda", seed=1)
    want, nothing = replies(model, monkeypatch, False, drafter)
    results, recorded = replies(model, monkeypatch, True, drafter)
    assert nothing is None and len(recorded._recorded) > 3 and not recorded._refused
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
