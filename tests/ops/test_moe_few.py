"""The experts' kernels for a few tokens against the definition."""

from __future__ import annotations

import pytest
import torch

from rille.ops.moe import ExpertOperands, expert_glu, expert_glu_normed, reference
from rille.ops.norm.reference import rms_norm
from tests.ops.test_moe_triton import GLUS, SITU, draw, poisoned

few = pytest.importorskip("rille.ops.moe.few", exc_type=ImportError)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 experts run in the interpreter alone")
__all__ = ["poisoned"]


class Few:
    """Operands of one call."""

    def __init__(self, ids: torch.Tensor, E: int, L: int, F: int, glu=SITU) -> None:
        (N, A), self.ids, self.glu = ids.shape, ids, glu
        self.x, self.weights = draw(N, L), draw(N, A).abs() + 0.1
        self.w13, self.w2 = draw(E, 2 * F, L, scale=L**-0.5), draw(E, L, F, scale=F**-0.5)

    def kernels(self, rows: slice = slice(None)) -> torch.Tensor:
        with torch.no_grad():
            operands = ExpertOperands(self.w13, self.w2, self.glu)
            return expert_glu(self.x[rows], self.ids[rows], self.weights[rows], operands, backend="triton")

    def exact(self) -> torch.Tensor:
        parts = (self.x.double(), self.ids, self.weights.double(), self.w13.double(), self.w2.double())
        return reference.expert_glu(*parts, self.glu)

    def compare(self) -> None:
        got, exact = self.kernels(), self.exact()
        assert got.shape == exact.shape and got.dtype == torch.float32 and got.isfinite().all()
        if got.numel():
            assert (got.double() - exact).abs().max() <= 5e-6 * exact.abs().max()


def choices(N: int, E: int, A: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(N, E, generator=torch.Generator().manual_seed(N + E + seed)).argsort(1)[:, :A].contiguous()


@pytest.fixture(autouse=True)
def only_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed here is computed by the kernels for a few tokens."""
    monkeypatch.setattr(few, "PAIRS_AN_EXPERT", 10**6)
    monkeypatch.setattr("rille.ops.moe.function.experts", None)


# N tokens, E experts, A active, L latent, F expert width
SIZES = [(1, 1, 1, 16, 8), (0, 4, 2, 16, 8), (11, 7, 3, 32, 24), (3, 64, 2, 16, 16)]


@pytest.mark.parametrize("glu, size", [*(("situ", size) for size in SIZES), ("swiglu", SIZES[2]), ("caps", SIZES[2])])
def test_sums_are_those_of_the_definition(size, glu, poisoned):
    N, E, A, L, F = size
    Few(choices(N, E, A), E, L, F, GLUS[glu]).compare()


@pytest.mark.parametrize("size", [(1, 5, 3, 48, 72), (4, 9, 2, 16, 40), (2, 3, 3, 32, 24)])
@pytest.mark.parametrize("glu", ["situ", "swiglu"])
def test_tokens_that_are_alone_read_for_themselves(size, glu, poisoned, monkeypatch):
    N, E, A, L, F = size
    monkeypatch.setattr(few, "by_pair", None)
    case = Few(choices(N, E, A), E, L, F, GLUS[glu])
    case.compare()
    four = case.kernels()
    assert torch.equal(case.kernels(slice(N - 1, N))[0], four[N - 1])


LISTED = [(50, 12, 4, 48, 40), (90, 70, 2, 16, 8), (200, 31, 5, 16, 24)]


@pytest.mark.parametrize("size", LISTED)
def test_more_pairs_are_listed_first(size, poisoned):
    N, E, A, L, F = size
    assert N * A > few.FEWEST_LISTED
    Few(choices(N, E, A), E, L, F).compare()


@pytest.mark.parametrize("tokens", [129, 300])
def test_all_tokens_of_a_list_at_one_expert(tokens, poisoned):
    Few(torch.full((tokens, 1), 2), 4, 16, 24).compare()


@pytest.mark.parametrize("size", [SIZES[2], (9, 40, 3, 48, 72), *LISTED[:2]])
def test_sums_in_steps(size, poisoned, monkeypatch):
    """Where a program cannot hold the weights of its columns."""
    monkeypatch.setattr(few, "HELD", 0)
    N, E, A, L, F = size
    Few(choices(N, E, A), E, L, F).compare()


@pytest.mark.parametrize("size", [SIZES[0], SIZES[2], (50, 12, 4, 48, 40), (1, 64, 6, 16, 8), (90, 70, 6, 16, 8)])
def test_the_norm_in_the_same_pass(size, poisoned):
    N, E, A, L, F = size
    case, gain = Few(choices(N, E, A), E, L, F), draw(L) + 1
    with torch.no_grad():
        operands = ExpertOperands(case.w13, case.w2, case.glu)
        got = expert_glu_normed(case.x, case.ids, case.weights, operands, gain, 1e-5, backend="triton")
    want = rms_norm(case.exact(), gain.double(), 1e-5)
    assert got.dtype == case.x.dtype and (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_norm_elsewhere_is_two_ops():
    case, gain = Few(choices(9, 5, 2), 5, 16, 8), draw(16) + 1
    operands = ExpertOperands(case.w13.requires_grad_(), case.w2, case.glu)
    got = expert_glu_normed(case.x, case.ids, case.weights, operands, gain, 1e-5)
    assert torch.equal(got, rms_norm(expert_glu(case.x, case.ids, case.weights, operands), gain, 1e-5))
    got.sum().backward()
    assert case.w13.grad is not None
    with pytest.raises(ValueError, match="gain of shape"):
        expert_glu_normed(case.x, case.ids, case.weights, operands, gain[1:], 1e-5)


@pytest.mark.parametrize("tokens", [16, 17, 33])
def test_all_tokens_at_one_expert(tokens, poisoned):
    Few(torch.full((tokens, 1), 2), 4, 16, 24).compare()


def test_a_column_block_that_is_not_full(poisoned):
    Few(choices(9, 5, 2), 5, 48, 72).compare()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_width(dtype, poisoned):
    Few(choices(9, 5, 2).to(dtype), 5, 16, 8).compare()


def test_a_token_has_the_same_sum_alone_and_among_others():
    """To the last bit on a GPU, if neither or both are alone; the interpreter's products depend on where a row
    stands."""
    case = Few(choices(12, 3, 2), 3, 32, 40)
    together = case.kernels()
    for n in (0, 11):
        torch.testing.assert_close(case.kernels(slice(n, n + 1))[0], together[n], atol=1e-6, rtol=1e-6)


def test_rows_of_x_may_lie_apart():
    case = Few(choices(9, 5, 2), 5, 16, 8)
    apart = torch.full((9, 50), torch.nan)
    apart[:, 16:32] = case.x
    case.x = apart[:, 16:32]
    case.compare()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_token_leaves_the_others_alone(value):
    case = Few(choices(12, 3, 2), 3, 16, 24)
    clean = case.kernels()
    case.x[7, 3] = value
    got = case.kernels()
    others = torch.arange(12) != 7
    assert torch.equal(got[others], clean[others]) and not torch.equal(got[7], clean[7])


def test_many_pairs_or_gradients_go_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert few.is_few(1024, 128) and not few.is_few(1025, 512) and not few.is_few(1024, 127)
    case, called = Few(choices(9, 5, 2), 5, 16, 8), []
    monkeypatch.setattr(few, "experts", lambda *a: called.append(a))
    case.w2.requires_grad_()
    expert_glu(case.x, case.ids, case.weights, ExpertOperands(case.w13, case.w2, SITU), backend="triton")
    assert not called
    case.kernels()
    assert called
