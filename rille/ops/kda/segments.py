"""Context parallelism: a sequence is cut into segments that run side by side, and the result is exact.

Whatever a segment of tokens does to the state before it is affine, with states value-first [V, K] as rows:

    after = before P + local        P [K, K]: product of what its chunks do; local [V, K]: its state from a zero start

Where sequences times heads are fewer than the multiprocessors, most of them idle while a few walk through thousands of
chunks. So three launches take the place of one:

    segments   P and local of all segments but the last, all at once (the first starts from the sequence's own state and
               needs no P)
    fold       the states at the borders, in order: before_(j+1) = before_j P_j + local_j
    pass       the ordinary state pass, in which each segment is a sequence of its own

`plan_segments` weighs the cost of the first two against what the third one gains. Across devices the pieces are the
same: `transition.py` gives P and local of a device's tokens, and an ordered fold of what the devices before it have
gives the state to start from.

Here are the planner and the pieces in PyTorch; `segment_pass.py` has the kernels, `segment_launch.py` their launches.

Suffixes: N packed tokens, S sequences, M chunks, G segments, H heads, C = 64 rows of a chunk, K key channels, V value
channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rille.ops.kda import chunk
from rille.ops.kda.arguments import Gate
from rille.ops.kda.chunk import CHUNK, check_lower_bound, schedule_chunks
from rille.ops.kda.reference import compute_dtype
from rille.packing import Packing, moved

Plan = tuple[tuple[int, ...], ...]  # for each sequence the chunks of its segments, in order

_size: int | Literal["auto"] | None = "auto"


@contextmanager
def cutting(size: int | Literal["auto"] | None) -> Iterator[None]:
    """Inside this context sequences are cut into segments of at most `size` chunks of 64 tokens, not at all (None), or
    as the planner decides ("auto", the default outside). For the whole process, not for one thread."""
    global _size
    if not (size is None or size == "auto" or (isinstance(size, int) and size > 0)):
        raise ValueError(f'kda: segments of {size!r} chunks; give a positive number, "auto" or None')
    before, _size = _size, size
    try:
        yield
    finally:
        _size = before


@dataclass(frozen=True)
class Costs:
    """Microseconds, measured on an H200 (2026-11-30). A step is one chunk of a program's rows of one head; a program
    has a multiprocessor to itself. What the host takes counts where it is more than what the card takes: of short work
    it is."""

    first: float = 8.0  # the first kernel, a chunk and head on one multiprocessor
    pass_step: float = 1.08  # 64 value rows
    wide_step: float = 2.06  # 128 of them, as the pass takes where 64 make more programs than multiprocessors
    segment_step: float = 0.84
    fold_step: float = 2.8
    launch: float = 5.0  # to start a kernel and to let it run dry
    bytes: float = 4.0e6  # that the card moves in a microsecond
    host: float = 210.0  # a call that is not cut
    host_cut: float = 400.0
    back_first: float = 46.0  # backward: its first and last kernel, and the bytes of its passes, a chunk and head
    back_step: float = 3.95  # both passes, 64 value rows
    wide_back: float = 9.9  # both with 128 value rows: they wait for memory, a chunk and head on one multiprocessor
    back_segment_step: float = 1.0
    host_train: float = 1400.0  # forward and backward
    host_train_cut: float = 2300.0
    margin: float = 0.95  # cut only where it takes at most this part of the time


def plan_segments(
    lengths: Sequence[int],
    heads: int,
    multiprocessors: int,
    K: int = 128,
    V: int = 128,
    size: int | Literal["auto"] | None = "auto",
    costs: Costs = Costs(),
    gradients: bool = False,
) -> Plan | None:
    """Chunks of each segment of each sequence, or None where nothing is to be cut.

    lengths: tokens of each sequence. size: as in `cutting`. gradients: weigh the backward pass, which takes the same
    segments, as well. Pure arithmetic on host numbers. All segments of a batch have about the same size, so short
    sequences stay whole.
    """
    chunks = [ceil(n / CHUNK) for n in lengths]
    if size is None or max(chunks, default=0) < 2:
        return None
    if size != "auto":
        plan = tuple(cut(n, size) for n in chunks)
        return plan if any(len(sizes) > 1 for sizes in plan) else None
    whole = tuple((n,) for n in chunks)
    weigh = train_microseconds if gradients else microseconds
    best, limit = None, costs.margin * weigh(whole, heads, multiprocessors, K, V, costs)
    if limit <= (costs.host_train_cut if gradients else costs.host_cut):  # whatever is cut takes as long on the host
        return None
    for candidate in sorted({ceil(max(chunks) / n) for n in range(2, MOST_SEGMENTS + 1)}):
        plan = tuple(cut(n, candidate) for n in chunks)
        cost = weigh(plan, heads, multiprocessors, K, V, costs)
        if candidate >= SHORTEST_SEGMENT and cost < limit:
            best, limit = plan, cost
    return best


MOST_SEGMENTS, SHORTEST_SEGMENT = 64, 8  # of a sequence; in chunks


def cut(chunks: int, size: int) -> tuple[int, ...]:
    """As few segments of at most `size` chunks as there can be, the first ones longer by a chunk if they do not go up
    evenly."""
    count = max(1, ceil(chunks / size))
    least, longer = divmod(chunks, count)
    return (least + 1,) * longer + (least,) * (count - longer)


def rounds(sizes: list[int], programs: int, multiprocessors: int) -> float:
    """Steps, one after another, of work with so many programs for each of its segments."""
    return max(max(sizes), ceil(len(sizes) * programs / multiprocessors) * sum(sizes) / len(sizes))


def microseconds(plan: Plan, heads: int, multiprocessors: int, K: int, V: int, costs: Costs) -> float:
    """What a forward call takes."""
    device_us, is_cut = forward_us(plan, heads, multiprocessors, K, V, costs), any(len(sizes) > 1 for sizes in plan)
    return max(device_us, costs.host_cut if is_cut else costs.host)


def train_microseconds(plan: Plan, heads: int, multiprocessors: int, K: int, V: int, costs: Costs) -> float:
    """What a call takes with its backward pass."""
    segments = [n for sizes in plan for n in sizes]
    later = [n for sizes in plan for n in sizes[1:]]
    values = heads * V // 64
    device_us = forward_us(plan, heads, multiprocessors, K, V, costs)
    device_us += costs.back_first * heads * sum(segments) / multiprocessors
    if V > 64 and len(segments) * values > multiprocessors:
        device_us += costs.wide_back * heads * sum(segments) / multiprocessors
    else:
        device_us += costs.back_step * rounds(segments, values, multiprocessors)
    if not later:
        return max(device_us, costs.host_train)
    device_us += costs.back_segment_step * rounds(later, values, multiprocessors) + costs.launch
    device_us += costs.fold_step * (max(len(sizes) for sizes in plan) - 2)
    return max(device_us, costs.host_train_cut)


def forward_us(plan: Plan, heads: int, multiprocessors: int, K: int, V: int, costs: Costs) -> float:
    segments = [n for sizes in plan for n in sizes]
    local = [n for sizes in plan for n in sizes[:-1]]
    products = [n for sizes in plan for n in sizes[1:-1]]
    values, units = heads * V // 64, heads * K // 64
    if V > 64 and len(segments) * values > multiprocessors:
        pass_us = costs.wide_step * rounds(segments, values // 2, multiprocessors)
    else:
        pass_us = costs.pass_step * rounds(segments, values, multiprocessors)
    pass_bytes = 2 * CHUNK * (2 * CHUNK + 3 * K + 2 * V) * heads * sum(segments)
    device_us = costs.first * heads * sum(segments) / multiprocessors + max(pass_us, pass_bytes / costs.bytes)
    if not local:
        return device_us
    programs = len(local) * values + len(products) * units
    steps = sum(local) * values + sum(products) * units
    segment_us = costs.segment_step * max(max(local), ceil(programs / multiprocessors) * steps / programs)
    segment_bytes = 2 * CHUNK * (CHUNK + 2 * K + V) * heads * sum(local)
    device_us += max(segment_us, segment_bytes / costs.bytes) + costs.launch
    folds = max(len(sizes) for sizes in plan) - 2
    return device_us + folds * costs.fold_step + (costs.launch if folds else 0.0)


class Segments(NamedTuple):
    """A plan as kernels read it: segments as sequences of the state pass, and the work before it.

    starts_G1 int32, order_G int32, first_G int64: of the segments, what `packing.starts`, `packing.longest_first` and
        `packing.chunks(64).first` are of the sequences. head_S, last_S int64: first and last segment of each sequence.
    jobs_J6, products_P2, chains_Q3 int32: the tables of `segment_kernel` and `fold_kernel`; back_J6, back_Q3 those of
        `reverse_segment_kernel` and of the fold backwards.
    """

    starts_G1: Tensor
    order_G: Tensor
    first_G: Tensor
    head_S: Tensor
    last_S: Tensor
    jobs_J6: Tensor
    products_P2: Tensor
    chains_Q3: Tensor
    back_J6: Tensor
    back_Q3: Tensor


def segments_of(
    packing: Packing, heads: int, multiprocessors: int, K: int, V: int, gradients: bool = False
) -> Segments | None:
    """The tables for a batch on its device, or None where it stays whole. Planned once for a packing and a shape."""
    key = ("kda segments", heads, multiprocessors, K, V, _size, gradients)
    if key not in packing.derived:
        plan = plan_segments(packing.lengths, heads, multiprocessors, K, V, _size, gradients=gradients)
        packing.derived[key] = tables(plan, packing) if plan is not None else None
    return packing.derived[key]


def tables(plan: Plan, packing: Packing) -> Segments:
    """Segments numbered through all sequences, a sequence without tokens being a segment too."""
    starts, firsts, heads, lasts = [0], [], [], []
    jobs, products, chains, back_jobs, back_chains = [], [], [], [], []
    chunks = 0  # of the sequences before
    for s, (sizes, tokens) in enumerate(zip(plan, packing.lengths, strict=True)):
        begin, head, last = starts[-1], len(firsts), len(firsts) + len(sizes) - 1
        if len(sizes) > 2:
            chains.append((head + 1, len(sizes) - 2, len(products)))
            back_chains.append((last - 1, len(sizes) - 2, len(products) + len(sizes) - 3))
        for g, size in enumerate(sizes, head):
            done = sum(sizes[: g - head])
            span = (begin + CHUNK * done, min(CHUNK * size, tokens - CHUNK * done), chunks + done)
            nothing = (span[0], 0, span[2])
            if g == head:
                jobs.append((*(span if g < last else nothing), s, g, g + 1 if g < last else -1))
            elif g < last:
                jobs.append((*span, -1, -1, g + 1))
                products.append((span[2], size))
                back_jobs.append((*span, -1, -1, g - 1))
            if g == last:
                back_jobs.append((*(span if g > head else nothing), s, g, g - 1 if g > head else -1))
            starts.append(span[0] + span[1])
            firsts.append(span[2])
        heads.append(head)
        lasts.append(last)
        chunks += sum(sizes)
    order = sorted(range(len(firsts)), key=lambda g: starts[g] - starts[g + 1])
    for work in (jobs, back_jobs):
        work.sort(key=lambda job: -job[1])
    rows = [jobs, products, chains, back_jobs, back_chains]
    narrow = on_device([starts, order, *map(flat, rows)], torch.int32, packing.device)
    wide = on_device([firsts, heads, lasts], torch.int64, packing.device)
    return Segments(*narrow[:2], *wide, *by_row(narrow[2:], (6, 2, 3, 6, 3)))


def flat(rows: list[tuple[int, ...]]) -> list[int]:
    return [number for row in rows for number in row]


def by_row(parts: list[Tensor], columns: tuple[int, ...]) -> list[Tensor]:
    return [part.view(-1, count) for part, count in zip(parts, columns, strict=True)]


def on_device(lists: list[list[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Lists of numbers in one copy to the device; each begins at a multiple of 16 bytes, as kernels like addresses."""
    padded = [numbers + [0] * (-len(numbers) % 4) for numbers in lists]
    parts = moved(torch.tensor(sum(padded, []), dtype=dtype), device).split([len(numbers) for numbers in padded])
    return [part[: len(numbers)] for part, numbers in zip(parts, lists, strict=True)]


def transition_in_chunks(
    k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, packing: Packing
) -> tuple[Tensor, Tensor]:
    """`transition.segment_transition` by the blocked form of `chunk.py`: its state pass once with v from zero states,
    once without v from unit states."""
    check_lower_bound(gate)
    dtype = compute_dtype(k_NHK, v_NHV, z_NHK, b_NH)
    (_, H, K), V, S = k_NHK.shape, v_NHV.shape[2], packing.num_sequences
    zero_SHVK = torch.zeros(S, H, V, K, dtype=dtype, device=k_NHK.device)
    unit_SHKK = torch.eye(K, dtype=dtype, device=k_NHK.device).expand(S, H, K, K)
    if packing.num_tokens == 0:
        return unit_SHKK.clone(), zero_SHVK
    schedule = schedule_chunks(packing)
    k_MHCK, beta_MHC1, decay, _, t_MHCC = chunk.within_chunks(k_NHK, z_NHK, b_NH, gate, schedule, dtype)
    w_MHCK, k_end_MHCK = t_MHCC @ (k_MHCK * decay.from_start_MHCK), beta_MHC1 * k_MHCK * decay.to_end_MHCK
    tv_MHCV, nothing_MHCK = t_MHCC @ schedule.gather(v_NHV.to(dtype)), torch.zeros_like(k_MHCK)
    *_, local_SHVK = chunk.state_pass(w_MHCK, tv_MHCV, k_end_MHCK, decay.whole_MH1K, zero_SHVK, schedule)
    *_, p_SHKK = chunk.state_pass(w_MHCK, nothing_MHCK, k_end_MHCK, decay.whole_MH1K, unit_SHKK, schedule)
    return p_SHKK, local_SHVK
