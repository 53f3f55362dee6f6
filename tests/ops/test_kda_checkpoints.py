"""States that sequences leave on their way through a batch, against batches that end at each place.

Without a GPU the kernels run in Triton's interpreter, where a state that is kept has the bits of the batch that ends
there: each program is a sequence and a head. In PyTorch stacks of other heights may be multiplied in another order, and
on a GPU two calls may be two kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.kda import Gate, Places, PooledState, cutting, kda
from rille.packing import Packing

HAS_GPU = torch.cuda.is_available()
FORMS = [("reference", torch.float64), ("chunk", torch.float64), ("chunk", torch.float32)]
LENGTHS = (1, 0, 63, 64, 65, 200, 150)
ODD = [[1], [], [1, 62], [64], [63, 64], [2, 60, 64, 70, 100, 128, 129, 199], [128, 150]]
EVERY = {
    "odd": ODD,
    "ends of chunks": [[], [], [], [64], [64], [64, 128, 192], [64, 128]],
    "one": [[], [], [], [], [], [131], []],
    "first chunks": [[], [], [5, 6, 7], [1], [], [63], [40]],
    "last tokens": [[1], [], [63], [64], [65], [200], [150]],
}


def draw(
    lengths: tuple[int, ...], dtype: torch.dtype, device: str, H: int, K: int, V: int
) -> tuple[list[Tensor], Gate]:
    """q, k, v, z, b and the gate."""
    generator, N = torch.Generator().manual_seed(0), sum(lengths)
    shapes = [(N, H, K), (N, H, K), (N, H, V), (N, H, K), (N, H)]
    q, k, v, z, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    parameters = (torch.randn(shape, generator=generator).to(device, wide) for shape in ((H,), (H, K)))
    return [q, k, v, 2 * z - 4, b], Gate(*parameters, lower_bound=-5.0)


def keep(
    inputs: list[Tensor], gate: Gate, lengths: tuple[int, ...], places: list[list[int]], backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """o, final and kept states. The pool is a strided view of a buffer of NaN, and nothing else is written there."""
    (_, H, K), V, device = inputs[0].shape, inputs[2].shape[2], inputs[0].device
    packing, P, S = Packing.of(lengths, device=device), sum(map(len, places)), len(lengths)
    order = torch.randperm(S + P + 3, generator=torch.Generator().manual_seed(3)).to(device)
    slots, kept = order[:S], order[S : S + P]
    buffer = torch.full((S + P + 3, 2, H, V, K), torch.nan, device=device, dtype=gate.dt_bias.dtype)
    pool = buffer[:, 1]
    pool[slots] = starting(inputs, S, gate.dt_bias.dtype)
    state = PooledState(pool, slots, *Places.of(packing, places).at(slots, kept))
    o, nothing = kda(*inputs, gate, packing, state, backend=backend)
    results = pool[slots].clone(), pool[kept].clone()
    assert nothing is None
    pool[order[: S + P]] = torch.nan
    assert buffer.isnan().all()
    return o, *results


def starting(inputs: list[Tensor], S: int, dtype: torch.dtype) -> Tensor:
    (_, H, K), V = inputs[0].shape, inputs[2].shape[2]
    return torch.randn(S, H, V, K, generator=torch.Generator().manual_seed(1)).to(inputs[0].device, dtype)


def ending(inputs: list[Tensor], gate: Gate, lengths: tuple[int, ...], places: list[list[int]], backend: str) -> Tensor:
    """Final states of a batch for each place, which ends there."""
    initial, found, start = starting(inputs, len(lengths), gate.dt_bias.dtype), [], 0
    for s, (some, length) in enumerate(zip(places, lengths, strict=True)):
        for tokens in some:
            packing, rows = Packing.of([tokens], device=inputs[0].device), [x[start : start + tokens] for x in inputs]
            _, final = kda(*rows, gate, packing, initial[s : s + 1], backend=backend)
            found.append(final[0])
        start += length
    return torch.stack(found)


def without(inputs: list[Tensor], gate: Gate, lengths: tuple[int, ...], backend: str) -> tuple[Tensor, Tensor | None]:
    packing = Packing.of(lengths, device=inputs[0].device)
    initial = starting(inputs, len(lengths), gate.dt_bias.dtype)
    return kda(*inputs, gate, packing, initial, backend=backend)


def assert_close(got: Tensor, want: Tensor, error: float) -> None:
    """error: of each state's norm; 0 asks for the same bits."""
    assert got.shape == want.shape and not got.isnan().any()
    if not error:
        assert torch.equal(got, want)
    for one, other in zip(got.double(), want.double(), strict=True):
        assert (one - other).norm() <= error * other.norm()


@pytest.mark.parametrize("places", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize(("backend", "dtype"), FORMS)
def test_states_of_batches_that_end_there(backend: str, dtype: torch.dtype, places: list[list[int]]) -> None:
    inputs, gate = draw(LENGTHS, dtype, "cpu", H=2, K=8, V=5)
    o, final, kept = keep(inputs, gate, LENGTHS, places, backend)
    want, want_final = without(inputs, gate, LENGTHS, backend)
    assert torch.equal(o, want) and want_final is not None and torch.equal(final, want_final), "nothing else changes"
    error = {torch.float64: 1e-14, torch.float32: 80 * 2.0**-24}[dtype]
    assert_close(kept, ending(inputs, gate, LENGTHS, places, backend), error)


@pytest.mark.parametrize("size", [None, 1])
def test_kernels(size: int | None) -> None:
    """Also where sequences are cut into segments, whose states at borders are rounded otherwise."""
    pytest.importorskip("triton")
    device, dtype = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
    lengths, places = (65, 0, 150), [[1, 63, 64], [], [2, 60, 64, 100, 110, 150]]
    inputs, gate = draw(lengths, dtype, device, H=1, K=64, V=64)
    with cutting(size):
        o, final, kept = keep(inputs, gate, lengths, places, "triton")
        want, want_final = without(inputs, gate, lengths, "triton")
    assert want_final is not None
    assert_close(o.flatten()[None], want.flatten()[None], 1e-3 if HAS_GPU else 0)
    assert_close(final, want_final, 1e-3 if HAS_GPU else 0)
    ends = ending(inputs, gate, lengths, places, "triton")
    assert_close(kept, ends, 1e-2 if HAS_GPU else 1e-5 if size else 0)
    exact = ending([x.double() for x in inputs], gate, lengths, places, "reference")
    assert_close(kept, exact, 1e-2 if HAS_GPU else 80 * 2.0**-24)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "H"), [((2048, 1, 1000), 96), ((9000,), 8)], ids=["wide", "segments"])
def test_kernels_of_a_card(lengths: tuple[int, ...], H: int) -> None:
    """At a model's widths, 128 values a program and segments as the planner cuts them; the host waits for nothing."""
    places = [sorted({1, 63, 64, 512, 1000, n - 1, n} & set(range(1, n + 1))) for n in lengths]
    inputs, gate = draw(lengths, torch.bfloat16, "cuda", H, K=128, V=128)
    o, final, kept = keep(inputs, gate, lengths, places, "triton")
    want, want_final = without(inputs, gate, lengths, "triton")
    assert want_final is not None
    assert_close(o.flatten()[None], want.flatten()[None], 1e-3)
    assert_close(final, want_final, 1e-3)
    assert_close(kept, ending(inputs, gate, lengths, places, "triton"), 1e-2)
    packing, pool = Packing.of(lengths, device="cuda"), torch.zeros(40, H, 128, 128, device="cuda")
    slots = torch.arange(40, device="cuda")[: len(lengths) + kept.shape[0]].split([len(lengths), kept.shape[0]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = PooledState(pool, slots[0], *Places.of(packing, places).at(*slots))
        kda(*inputs, gate, packing, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_places_are_planned_on_the_host() -> None:
    """A chunk's end is a checkpoint of the pass; a chunk that begins at a kept state needs no other one."""
    packing = Packing.of([200, 100])
    checkpoints, between = Places.of(packing, [[64, 70, 100, 130, 192, 200], [10]]).at(
        torch.tensor([20, 21]), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    )
    assert checkpoints.tolist() == [0, 3, 4, 5, -1, -1]
    assert between is not None and between.packing.lengths == (6, 36, 2, 10)
    assert between.slots.tolist() == [1, 2, 3, 6] and between.first.tolist() == [6, 7, 8, 9]
    before, after = ([x.tolist() for x in copied] for copied in (between.before, between.after))
    assert before == [[21], [6]] and after == [[0, 0], [1, 2]]
    assert between.spans[6:].tolist() == [[64, 6], [64, 36], [128, 2], [200, 10]]
    assert between.rows.tolist() == [*range(64, 70), *range(64, 100), *range(128, 130), *range(200, 210)]
    checkpoints, between = Places.of(packing, [[128], [100]]).at(torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert checkpoints.tolist() == [-1, 2, -1, -1, -1, 3] and between is None


def test_mistakes_are_named() -> None:
    inputs, gate = draw((70, 3), torch.float32, "cpu", H=1, K=8, V=5)
    packing, slots = Packing.of((70, 3)), torch.tensor([0, 1])
    for some in ([0], [71], [5, 4], [5, 5]):
        with pytest.raises(
            ValueError, match=rf"\[{', '.join(map(str, some))}\] of sequence 0 must rise and lie in 1\.\.70"
        ):
            Places.of(packing, [some, []])
    places = Places.of(packing, [[5, 64], [1]])
    with pytest.raises(ValueError, match=r"slots of shape \(2,\) for 3 places"):
        places.at(slots, torch.tensor([2, 3]))
    for kept in ([2, 3, 2], [2, 3, 0]):
        with pytest.raises(ValueError, match="name one slot twice"):
            places.at(slots, torch.tensor(kept))
    state = PooledState(torch.zeros(5, 1, 5, 8), slots, *places.at(slots, torch.tensor([2, 3, 4])))
    inputs[0].requires_grad_()
    with pytest.raises(ValueError, match="only where no gradient is wanted"):
        kda(*inputs, gate, packing, state)
