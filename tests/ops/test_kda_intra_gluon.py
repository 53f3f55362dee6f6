"""The Gluon forms of the first KDA kernel, run by Python on a CPU, against their Triton twin in the interpreter, which
keeps fp32 operands for fp32 inputs: the difference is the rounding of operands to bf16."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate, intra_gluon, intra_softplus_gluon, numbers_gluon, solve_gluon
from rille.ops.kda import forward as kernels
from rille.ops.kda.forward import INTERPRET, intra
from rille.packing import Packing
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_places_on_cpu import kernels_of, places

pytestmark = pytest.mark.skipif(not INTERPRET, reason="on a GPU test_kda_triton.py ties both")
LENGTHS = (1, 64, 100)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the first kernel run its Gluon form."""
    modules = (numbers_gluon, solve_gluon, intra_gluon, intra_softplus_gluon)
    *_, bounded, softplus = kernels_of(monkeypatch, *modules)
    copies = {
        intra_gluon.intra_tile_kernel: bounded.intra_tile_kernel,
        intra_softplus_gluon.intra_softplus_kernel: softplus.intra_softplus_kernel,
    }

    def launch(kernel: Any, programs: int, arguments: tuple, **options: Any) -> None:
        tile_kernel = partial(copies[kernel], num_warps=options["num_warps"])
        Kernel(tile_kernel)[(programs,)](*arguments, **options)

    monkeypatch.setattr(kernels, "TILED", True)
    monkeypatch.setattr(kernels, "launch", launch)


def draw(K: int, bound: float | None, spread: float = 3.0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    N, H = sum(LENGTHS), 2
    q, k, z = (torch.randn(N, H, K, generator=generator) for _ in range(3))
    b = torch.randn(N, H, generator=generator)
    gate = Gate(0.3 * torch.randn(H, generator=generator), torch.randn(H, K, generator=generator), bound)
    tokens = [x.bfloat16() for x in (q, k, spread * z, b)]
    return *tokens, gate.A_log, gate.dt_bias, bound, Packing.of(LENGTHS).chunks(64).spans


def in_fp32(arguments: Any) -> Any:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


def assert_twins_agree(arguments: Any, request: pytest.FixtureRequest) -> None:
    """T in two digits counts as their sum."""
    wanted = intra(*in_fp32(arguments))
    request.getfixturevalue("tiled")
    made = [intra(*arguments, digits=digits) for digits in (1, 2)]
    for got in made:
        for name, x, y in zip(wanted._fields, got, wanted, strict=True):
            x, y = (each.double().sum(0) if name == "t_DMHCC" else each.double() for each in (x, y))
            assert bool(x.isfinite().all()), name
            distance = (x - y).norm() / y.norm().clamp_min(1e-30)
            assert distance <= 5e-3, f"{name} is off by {distance:.1e}"
        for square in (*got.t_DMHCC, got.a_MHCC):
            assert torch.equal(square, square.tril())
    assert torch.equal(made[0].t_DMHCC[0], made[1].t_DMHCC[0])


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("K", [64, 128])
def test_twins_agree(K: int, bound: float | None, request: pytest.FixtureRequest) -> None:
    assert_twins_agree(draw(K, bound), request)


@pytest.mark.parametrize("spread", [100.0, 12.0])
def test_twins_agree_where_the_softplus_gate_shuts(spread: float, request: pytest.FixtureRequest) -> None:
    """Most channels lose all or nothing at each token, and what is measured across a block's middle is largest."""
    assert_twins_agree(draw(64, None, spread), request)


@pytest.mark.parametrize("spread", [100.0, 12.0])
def test_twins_agree_where_the_bounded_gate_shuts(spread: float, request: pytest.FixtureRequest) -> None:
    assert_twins_agree(draw(128, -5.0, spread), request)


def test_places_of_the_square_are_those_of_its_tiles_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse looks at one square in five ways: what it calls a tile, a block or eight words of a row is that."""
    _, solve = kernels_of(monkeypatch, numbers_gluon, solve_gluon)
    square = places(torch.float32, [64, 64], solve.SQUARE_S)
    tiles, blocks = (
        places(torch.float32, [4096 // size**2, size, size], layout)
        for size, layout in ((16, solve.TILE_S), (32, solve.BLOCK_S))
    )
    diagonal = places(torch.float32, [2, 2, 2, 16, 16], solve.DIAGONAL_S)[:, 0].reshape(4, 16, 16)
    eights = places(torch.float32, [2, 2, 2, 32, 8], solve.EIGHTS_S)[:, 0].reshape(4, 32, 8)
    for tile in range(4):
        here = square[16 * tile : 16 * tile + 16, 16 * tile : 16 * tile + 16]
        assert torch.equal(here, diagonal[tile]) and torch.equal(here, tiles[4 * (tile // 2) + tile % 2])
        for row in range(16):
            found = [eights[tile, solve.place_of(row, eight)] for eight in range(2)]
            assert torch.equal(here[row], torch.cat(found))
    for half in range(2):
        a, b = slice(32 * half, 32 * half + 16), slice(32 * half + 16, 32 * half + 32)
        assert torch.equal(square[b, a], tiles[4 * half + 3]) and torch.equal(square[a, b], tiles[4 * half + 2])
    early, late = slice(0, 32), slice(32, 64)
    for n, (row, column) in enumerate(((early, early), (late, late), (early, late), (late, early))):
        assert torch.equal(square[row, column], blocks[n])


def test_no_bank_of_shared_memory_is_met_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what half a warp touches at once, two words a thread: a product's sums or left operand (four rows of eight
    columns), and by what a whole one does, one word a thread: a right operand (eight columns in every other of eight
    rows) and a column of two tiles."""
    _, solve = kernels_of(monkeypatch, numbers_gluon, solve_gluon)
    banks = places(torch.float32, [64, 64], solve.SQUARE_S) % 32
    for row in range(0, 64, 4):
        for column in range(0, 64, 8):
            assert banks[row : row + 4, column : column + 8].unique().numel() == 32
    for row in range(0, 64, 8):
        for first in range(2):
            for column in range(0, 64, 8):
                assert banks[row + first : row + 8 : 2, column : column + 8].unique().numel() == 32
    for row in range(64):
        assert banks[row, row // 16 * 16 :][:16].unique().numel() == 16
