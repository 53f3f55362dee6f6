"""Kernels of the router, the permutation and the experts against their definitions: values, gradients, hard cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rille.ops import moe
from rille.ops.moe import ExpertOperands, expert_glu, reference, required_bias_histogram, route, route_logits
from rille.ops.situ import situ_glu, swiglu

function = pytest.importorskip("rille.ops.moe.function", exc_type=ImportError)
permute = pytest.importorskip("rille.ops.moe.permute", exc_type=ImportError)
products = pytest.importorskip("rille.ops.moe.products", exc_type=ImportError)
router = pytest.importorskip("rille.ops.moe.router", exc_type=ImportError)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 experts run in the interpreter alone")

SITU = partial(situ_glu, cap_gate=4.0, cap_up=25.0)
GLUS = {"situ": SITU, "caps": partial(situ_glu, cap_gate=0.5, cap_up=2.0), "swiglu": swiglu}
# N tokens, E experts, A active, L latent, F expert width
SIZES = [(1, 1, 1, 16, 8), (0, 4, 2, 16, 8), (37, 7, 3, 32, 24), (5, 64, 2, 16, 16), (65, 3, 3, 48, 40)]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw_ids(N: int, E: int, A: int) -> Tensor:
    return torch.rand(N, E, generator=torch.Generator().manual_seed(N + E)).argsort(1)[:, :A].contiguous()


class Case:
    """Operands of one call that want gradients; `run` gives outputs and gradients of a wave over the output."""

    def __init__(self, N: int, E: int, A: int, L: int, F: int, glu: Callable[..., Tensor] = SITU):
        self.ids, self.glu = draw_ids(N, E, A), glu
        self.leaves = [
            draw(N, L), draw(N, A).abs() + 0.1, draw(E, 2 * F, L, scale=L**-0.5), draw(E, L, F, scale=F**-0.5),
        ]  # fmt: skip

    def run(self, call: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves]
        out = call(leaves[0], self.ids, *leaves[1:])
        wave = torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape)
        grads = torch.autograd.grad((out * wave).sum(), leaves, allow_unused=True, materialize_grads=True)
        return [out.detach(), *grads]

    def kernels(self) -> list[Tensor]:
        return self.run(lambda x, ids, w, w13, w2: expert_glu(x, ids, w, ExpertOperands(w13, w2, self.glu),
                                                              backend="triton"))  # fmt: skip

    def exact(self) -> list[Tensor]:
        return self.run(lambda *a: reference.expert_glu(*a, self.glu), torch.float64)

    def compare(self, limit: float = 5e-6) -> list[Tensor]:
        got = self.kernels()
        for a, b in zip(got, self.exact(), strict=True):
            assert a.shape == b.shape and a.isfinite().all()
            if a.numel():
                assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp_min(1e-6)
        return got


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN, or a row that does not exist."""

    def fill(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(2**30)

    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))


@pytest.mark.parametrize("size", SIZES)
def test_experts_with_gradients(size: tuple[int, ...], poisoned: None) -> None:
    Case(*size).compare()


@pytest.mark.parametrize("glu", ["caps", "swiglu"])
def test_activations(glu: str) -> None:
    Case(9, 4, 2, 16, 24, GLUS[glu]).compare()


def test_one_expert_takes_all_and_the_idle_get_exact_zeros(poisoned: None) -> None:
    case = Case(40, 5, 1, 16, 24)
    case.ids.fill_(2)
    *_, dw13, dw2 = case.compare()
    idle = [0, 1, 3, 4]
    assert not dw13[idle].any() and not dw2[idle].any()


def test_an_expert_chosen_twice_counts_twice() -> None:
    case = Case(6, 4, 2, 16, 8)
    case.ids[3] = 1
    case.compare()


def test_idle_experts_are_not_read() -> None:
    """Tiles of weights may reach into the next expert: NaN there must not show."""
    case = Case(5, 64, 2, 16, 24)
    clean = case.kernels()
    idle = torch.bincount(case.ids.flatten(), minlength=64) == 0
    for weight in case.leaves[2:]:
        weight[idle] = torch.nan
    for a, b in zip(case.kernels(), clean, strict=True):
        assert torch.equal(a, b)


def test_a_row_depends_on_its_own_token_alone() -> None:
    case = Case(37, 7, 3, 32, 24)
    clean = case.kernels()
    case.leaves[0][20] = torch.nan
    keep = [n for n in range(37) if n != 20]
    out, dx, dweights, *_ = case.kernels()
    for a, b in zip((out, dx, dweights), clean[:3], strict=True):
        assert torch.equal(a[keep], b[keep])
    alone = Case(37, 7, 3, 32, 24)
    alone.ids, alone.leaves[0], alone.leaves[1] = alone.ids[5:6], alone.leaves[0][5:6], alone.leaves[1][5:6]
    assert torch.equal(alone.kernels()[0], clean[0][5:6]), "in any batch the same bits"


def test_both_forms_agree() -> None:
    case = Case(37, 7, 3, 32, 24)
    fused, library = (
        case.run(lambda *a, form=form: function.experts(*a, 4.0, 25.0, True, form)[0]) for form in function.FORMS
    )
    for a, b in zip(fused, library, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_frozen_experts_and_no_gradient() -> None:
    case = Case(9, 4, 2, 16, 8)
    x, weights, w13, w2 = case.leaves
    operands = ExpertOperands(w13, w2, SITU)
    assert not expert_glu(x, case.ids, weights, operands, backend="triton").requires_grad
    want = case.kernels()
    leaf = x.clone().requires_grad_()
    out = expert_glu(leaf, case.ids, weights, operands, backend="triton")
    (dx,) = torch.autograd.grad((out * torch.arange(out.numel()).float().sin().view(out.shape)).sum(), leaf)
    assert torch.equal(out.detach(), want[0]) and torch.equal(dx, want[1])


def test_rows_that_lie_apart_and_ids_of_any_layout() -> None:
    case = Case(9, 4, 2, 16, 8)
    x, weights, w13, w2 = case.leaves
    operands, wide = ExpertOperands(w13, w2, SITU), torch.full((9, 40), torch.nan)
    wide[:, 8:24] = x
    want = expert_glu(x, case.ids, weights, operands, backend="triton")
    got = expert_glu(wide[:, 8:24], case.ids.t().contiguous().t(), weights, operands, backend="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize(("N", "E", "A"), [(0, 4, 2), (1, 1, 1), (5, 64, 2), (50, 7, 3), (33, 896, 16)])
def test_places(N: int, E: int, A: int) -> None:
    """A counting sort: experts in order, each from a whole tile on, pairs of an expert in their own order."""
    ids, tile = draw_ids(N, E, A), permute.TILE
    places = permute.permute(ids, E)
    count = torch.bincount(ids.flatten(), minlength=E)
    padded = (count + tile - 1) // tile * tile
    assert torch.equal(places.ends.long(), padded.cumsum(0))
    start, flat = padded.cumsum(0) - padded, ids.flatten()
    seen, want = [0] * E, []
    for expert in flat.tolist():
        want.append(int(start[expert]) + seen[expert])
        seen[expert] += 1
    assert places.row_of_pair.tolist() == want
    back = torch.full_like(places.pair_of_row, -1)
    back[places.row_of_pair.long()] = torch.arange(N * A, dtype=torch.int32)
    assert torch.equal(places.pair_of_row, back)
    tiles = torch.repeat_interleave(torch.arange(E), padded // tile)
    assert len(tiles) <= len(places.expert_of_tile) == permute.tiles_bound(N * A, E)
    assert places.expert_of_tile.tolist() == tiles.tolist() + [-1] * (len(places.expert_of_tile) - len(tiles))


ROUTES = [(1, 1, 1), (0, 4, 2), (63, 8, 3), (17, 16, 16), (33, 896, 16), (7, 5, 1), (40, 37, 5)]


@pytest.mark.parametrize(("N", "E", "top"), ROUTES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_router(N: int, E: int, top: int, renormalise: bool, poisoned: None) -> None:
    logits, bias = draw(N, E).requires_grad_(), draw(E, seed=1, scale=0.5)
    got, want = (route_logits(logits, bias, top, 2.5, renormalise, 40, backend=name) for name in ("triton", "select"))
    assert torch.equal(got.ids.sort(1).values, want.ids.sort(1).values) and got.ids.dtype == torch.int64
    torch.testing.assert_close(got.cutoff, want.cutoff, rtol=0, atol=3e-7)
    assert torch.equal(got.load, want.load) and got.load.dtype == torch.int64
    scores = torch.sigmoid(logits)
    weights = reference.route_weights(scores, got.ids, 2.5, renormalise)
    torch.testing.assert_close(got.weights, weights, rtol=2e-6, atol=0)
    wave = torch.arange(weights.numel()).float().cos().view(weights.shape)
    (a,), (b,) = (torch.autograd.grad((w * wave).sum(), logits) for w in (got.weights, weights))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not got.cutoff.requires_grad


def test_router_ties_nan_and_infinities() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-2, 2, (100, 24), generator=generator).float()
    for top in (1, 5, 23, 24):
        got, want = (route_logits(logits, torch.zeros(24), top, backend=name) for name in ("triton", "select"))
        assert torch.equal(got.ids.sort(1).values, want.ids.sort(1).values), "equal scores go to the lower id"
    bias = torch.zeros(6)
    bias[1] = -torch.inf
    ids = route_logits(torch.tensor([[9.0, 9, 9, -200, 200, 0]]), bias, 5, backend="triton").ids
    assert ids.sort(1).values.tolist() == [[0, 2, 3, 4, 5]]
    sick = route_logits(torch.full((2, 6), torch.nan), torch.zeros(6), 2, backend="triton")
    assert ((sick.ids >= 0) & (sick.ids < 6)).all() and sick.weights.isnan().all()


@pytest.mark.parametrize(("N", "E", "top"), ROUTES)
def test_a_router_that_counts_nothing_chooses_the_same(N: int, E: int, top: int, poisoned: None) -> None:
    """Few rows are then sought through in another way; with ties, infinities and NaN."""
    drawn, bias = draw(N, E), draw(E, seed=1, scale=0.5)
    bias[: E // 3] = -torch.inf if 3 * top < E else 0.0
    for logits in (drawn, drawn.round(), torch.where(drawn > 1, torch.nan, drawn), torch.full((N, E), -torch.inf)):
        counted, plain = (
            route_logits(logits, bias, top, 2.5, loaded=loaded, backend="triton") for loaded in (True, False)
        )
        for name in ("ids", "weights", "cutoff"):
            one, other = getattr(counted, name), getattr(plain, name)
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert plain.load.numel() == 0


@pytest.mark.parametrize(("N", "E"), [(1, 1), (16_384, 256), (131_072, 256), (131_072, 896), (9_000_000, 40)])
def test_no_program_of_the_histogram_counts_beyond_16_bits(N: int, E: int) -> None:
    groups, shares = router.histogram_grid(N, E, 132)
    assert groups * router.EXPERTS >= E > (groups - 1) * router.EXPERTS
    tiles = -(-N // router.TOKENS)
    assert -(-tiles // shares) * router.TOKENS <= 65_535
    assert groups * shares <= 132 or shares == 1 or -(-tiles // (shares - 1)) * router.TOKENS > 65_535


def test_which_histograms_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2^22 scores and more, on Hopper, whose bins fit shared memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not router.counted_apart(torch.empty(131_072, 256), 4000), "no kernel on a CPU"
    card = (9, 0)
    monkeypatch.setattr(router, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card)
    with FakeTensorMode():
        many, few = (torch.empty(N, 256, device="cuda") for N in (16_384, 16_383))
        assert [router.counted_apart(many, bins) for bins in (0, 8, 4096, 4097)] == [False, True, True, False]
        assert not router.counted_apart(few, 4000)
        card = (8, 0)
        assert not router.counted_apart(many, 4000)


def test_router_histogram_is_the_definition_in_any_split() -> None:
    """The kernel's own scores make its counts, so the definition is asked about scores that need no sigmoid."""
    scores, bias = torch.sigmoid(draw(41, 12)), draw(12, seed=1, scale=0.3)
    whole = torch.zeros(12, 64, dtype=torch.int64)
    for part in scores.split([7, 0, 33, 1]):
        _, _, _, cutoff, load, histogram = router.router(part, bias, 3, 1.0, True, 64, True)
        assert torch.equal(histogram, required_bias_histogram(part, cutoff, bias, 64))
        assert int(load.sum()) == 3 * len(part)
        whole += histogram
    cutoff = route(scores, bias, 3).cutoff
    assert torch.equal(whole, required_bias_histogram(scores, cutoff, bias, 64))
    assert route_logits(scores, bias, 3, backend="triton").histogram.shape == (12, 0), "nothing counted unasked"


def test_route_of_scores() -> None:
    scores, bias = torch.sigmoid(draw(40, 9)), draw(9, seed=1, scale=0.5)
    got, want = (route(scores, bias, 4, backend=name) for name in ("triton", "select"))
    assert torch.equal(got.ids.sort(1).values, want.ids.sort(1).values) and torch.equal(got.cutoff, want.cutoff)


def test_ops_are_registered_whole() -> None:
    checks = ("test_schema", "test_faketensor")
    x, weights, w13, w2 = Case(9, 4, 2, 16, 8).leaves
    arguments = (x, draw_ids(9, 4, 2), weights, w13, w2, 4.0, 25.0, True, "fused")
    torch.library.opcheck(function.experts.registered, arguments, test_utils=checks)
    torch.library.opcheck(router.router.registered, (draw(9, 4), draw(4), 2, 1.0, True, 8, False), test_utils=checks)
    ids = draw_ids(9, 4, 2)
    torch.library.opcheck(router.router_backward.registered, (weights, ids, weights, 4, 1.0, True), test_utils=checks)


def test_one_graph() -> None:
    case = Case(9, 4, 2, 16, 8)

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        routed = route_logits(logits, torch.zeros(4), 2, backend="triton")
        return expert_glu(x, routed.ids, routed.weights, ExpertOperands(w13, w2, SITU), backend="triton")

    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in (case.leaves[0], draw(9, 4), *case.leaves[2:])]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(call(*inputs).square().sum(), inputs) for call in (compiled, layer)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_choice_and_refusal() -> None:
    x, weights, w13, w2 = Case(9, 4, 2, 16, 8).leaves
    ids, operands = draw_ids(9, 4, 2), ExpertOperands(w13, w2, SITU)
    assert moe.choose_backend(x, operands) == ("grouped", "the tensors are on cpu")
    with pytest.raises(ValueError, match="unknown backend 'fast'; there are triton, grouped"):
        expert_glu(x, ids, weights, operands, backend="fast")
    with pytest.raises(ValueError, match=r"cannot run: .*float64"):
        expert_glu(x.double(), ids, weights, ExpertOperands(w13.double(), w2.double(), SITU), backend="triton")
    with pytest.raises(ValueError, match="16 divides.* not 12 and 8"):
        expert_glu(x[:, :12], ids, weights, ExpertOperands(w13[..., :12], w2[:, :12], SITU), backend="triton")
    with pytest.raises(ValueError, match="gaps between rows"):
        gapped = w2.transpose(1, 2).contiguous().transpose(1, 2)
        expert_glu(x, ids, weights, ExpertOperands(w13, gapped, SITU), backend="triton")
    with pytest.raises(ValueError, match="know swiglu and situ_glu"):
        expert_glu(x, ids, weights, ExpertOperands(w13, w2, torch.mul), backend="triton")
    with pytest.raises(ValueError, match="up to 2048 experts, these are 3000"):
        route_logits(draw(2, 3000), draw(3000), 2, backend="triton")


def test_tiles_of_the_plan_divide_the_sums_over_rows_of_weights() -> None:
    """A step that reached beyond its expert would add the next one's weights."""
    for length in (16, 48, 80, 256, 448, 896, 3584):
        assert length % products.divisor(length) == 0
