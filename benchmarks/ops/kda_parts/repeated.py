"""What `benchmarks/ops/kda_under_load.py` repeats: KDA's kernels in each form, and two controls; how it compares."""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kda_parts import backward as bench
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from rille.ops.kda import backward as kernels
from rille.ops.kda import forward, intra_gluon
from rille.ops.launching import launch, tiles_of

Results = dict[str, Tensor]
SMALL, LARGE = bench.Work("16 x 1000", 16, (1000,)), bench.Work("96 x 2048", 96, (2048,))
WORKS = [work for each in (SMALL, LARGE) for work in (each, replace(each, name=f"{each.name} softplus", bound=None))]
TILES = (512, 3072)  # of the two controls
TOKENS = 1000  # a first axis so long is one of tokens
PRIME = 251  # the pattern's numbers are below it, and whole ones below 256 are exact in bf16
LAST_LINE = "    tma.store_wait(0)\n"  # of the first kernel


class Form(NamedTuple):
    """Which of the forward pass's kernels are Gluon; whole: the first waits until its writes have arrived."""

    first: bool = True
    ring: bool = True
    whole: bool = False


FORMS = {
    "as it is": Form(),
    "twin": Form(first=False, ring=False),
    "first twin": Form(first=False),
    "pass twin": Form(ring=False),
    "whole wait": Form(whole=True),
}


class Stage(NamedTuple):
    name: str
    run: Callable[[], Results]
    expected: Results


@gluon.jit
def whole_wait():
    """Until the writes of all bulk stores have arrived; by its name `tma.store_wait` waits until shared memory has been
    read. (ptxas 12.8 makes one instruction of either, DEPBAR.LE SB0, and after this one also empties the L1 cache.)"""
    thread = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [thread], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stored_tile_kernel(out_desc, MODULUS: gl.constexpr, WHOLE: gl.constexpr):
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i, j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE)), gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    numbers = gl.program_id(0) + i[:, None] * 64 + j[None, :]
    tile_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], out_desc.layout)
    tile_s.store((numbers % MODULUS).to(gl.float32).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [gl.program_id(0) * 64, 0], tile_s)
    tma.store_wait(0)
    if WHOLE:
        whole_wait()


@lru_cache
def kernel_with_whole_wait() -> Any:
    """A copy of the first kernel: the same source with one more line."""
    text = Path(intra_gluon.__file__).read_text()
    if text.count(LAST_LINE) != 1 or not text.endswith(LAST_LINE):
        raise ValueError(f"whole wait: {LAST_LINE.strip()} is not the one last line of intra_gluon.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intra_whole_wait.py"
        path.write_text(text + "    whole_wait()\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    module.__dict__["whole_wait"] = whole_wait
    return module.intra_tile_kernel


@contextmanager
def in_form(form: Form) -> Iterator[None]:
    before = forward.TILED, forward.RING, intra_gluon.intra_tile_kernel
    forward.TILED, forward.RING = form.first, form.ring
    if form.whole:
        intra_gluon.intra_tile_kernel = kernel_with_whole_wait()
    try:
        yield
    finally:
        forward.TILED, forward.RING, intra_gluon.intra_tile_kernel = before


def pattern(tiles: int, device: str) -> Tensor:
    """[tiles, 1, 64, 64]: row by row the numbers from the tile's own on."""
    return torch.arange(tiles, device=device)[:, None, None, None] + torch.arange(4096, device=device).view(64, 64)


def controls(tiles: int, whole: bool, device: str) -> list[Stage]:
    """Without a card the plain one alone."""
    numbers, expected = pattern(tiles, device), (pattern(tiles, "cpu") % PRIME).bfloat16().to(device)

    def by_tma() -> Results:
        out = torch.empty(tiles, 1, 64, 64, dtype=torch.bfloat16, device=device)
        launch(stored_tile_kernel, tiles, (tiles_of(out, 64),), MODULUS=PRIME, WHOLE=whole, num_warps=4)
        return {"pattern": out}

    stages = [Stage(f"plain {tiles}", lambda: {"pattern": (numbers % PRIME).bfloat16()}, {"pattern": expected})]
    return stages + ([Stage(f"tma {tiles}", by_tma, {"pattern": expected})] if device == "cuda" else [])


def stages_of(work: bench.Work) -> list[Stage]:
    case = bench.draw(work, stateful=True)
    assert case.dfinal is not None
    initial, do, dfinal = case.leaves[7].detach(), case.do, case.dfinal
    inputs = bench.inputs_of(case)._replace(initial_SHVK=initial)
    arguments = (*inputs[:2], *inputs[3:8], inputs.spans_M2)
    made = forward.intra(*arguments, digits=2)
    squares = (made.t_DMHCC, made.a_MHCC)
    prepared = kernels.prepare(inputs, digits=2)
    before = kernels.states(inputs, prepared, squares[0])
    after = kernels.reverse(inputs, prepared, *squares, do, dfinal)
    operands = (*before, after[1], prepared.totals_MH4K, prepared.norms_MH4C)

    def state_pass() -> Results:
        final = torch.empty_like(initial)
        o = forward.state_pass(made, inputs.v_NHV, inputs.starts, inputs.order_S, inputs.first_S, initial, final)
        return {"o": o, "final": final}

    def backward() -> Results:
        found = kernels.prepare(inputs, digits=2)._asdict()
        found |= zip(("u", "states"), kernels.states(inputs, prepared, squares[0]), strict=True)
        found |= zip(
            ("dv", "dstates", "dinitial"), kernels.reverse(inputs, prepared, *squares, do, dfinal), strict=True
        )
        last = kernels.local(inputs, do, after[0], after[2], *operands)._asdict()
        return found | {f"d{name}": last[name] for name in ("q_NHK", "k_NHK", "z_NHK", "b_NH", "A_log", "dt_bias_HK")}

    runs = {"first": lambda: forward.intra(*arguments, digits=2)._asdict(), "pass": state_pass, "backward": backward}
    return [Stage(f"{name} {work.name}", run, run()) for name, run in runs.items()]


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def different(got: Results, expected: Results) -> list[str]:
    same = torch.stack([(bits(got[name]) == bits(x)).all() for name, x in expected.items()]).tolist()
    return [name for name, equal in zip(expected, same, strict=True) if not equal]


def described(got: Tensor, expected: Tensor) -> str:
    """A second look: how much differs, in how many tiles, 64 tokens of a head where there are none, and as what."""
    wrong = bits(got) != bits(expected)
    if not wrong.any():
        return "right at a second look"
    at = wrong.nonzero()
    rows = 64 if got.ndim < 4 and len(got) >= TOKENS else 1
    tiles = at[:, :-2] if got.ndim > 3 else torch.cat([at[:, :1] // rows, at[:, 1:2]], 1)
    never = wrong & (bits(got) == bits(torch.full_like(got.flatten()[:1], torch.nan)))
    kinds = (int(never.sum()), int((wrong & got.isnan()).sum() - never.sum()), int((wrong & ~got.isnan()).sum()))
    where = f"{tuple(got.shape)}, {len(at)} elements in {len(tiles.unique(dim=0))} tiles, the first {at[0].tolist()}"
    return f"{where}: {kinds[0]} never written, {kinds[1]} NaN, {kinds[2]} other values"
