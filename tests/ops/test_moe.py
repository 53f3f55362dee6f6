"""Routing (ties, cutoff, gradient) and the grouped expert product against the token-by-token definition."""

import pytest
import torch
from torch import Tensor

from rille.ops.moe import ExpertOperands, Routing, expert_glu, grouped, reference, route, route_weights
from rille.ops.situ import situ_glu, swiglu

# N tokens, E experts, A active, L latent, F expert width
SIZES = [(1, 1, 1, 1, 1), (0, 4, 2, 3, 5), (15, 4, 4, 3, 5), (63, 8, 3, 17, 6), (5, 64, 2, 4, 8)]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_scores(N: int, E: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and a bias strong enough to change most choices."""
    return torch.sigmoid(draw(N, E, seed=seed)).float(), (0.5 * draw(E, seed=seed + 1)).float()


def soft_capped(gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, 4.0, 25.0)


class Case:
    """One call of the expert product: operands that want gradients, and ids that leave some experts without tokens."""

    def __init__(self, N: int, E: int, A: int, L: int, F: int, dtype: torch.dtype = torch.float64):
        scores, bias = draw_scores(N, E)
        self.ids = route(scores, bias, A).ids
        self.weights = route_weights(scores, self.ids).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        self.x = draw(N, L, dtype=dtype).requires_grad_()
        self.w13 = draw(E, 2 * F, L, dtype=dtype, seed=1).requires_grad_()
        self.w2 = draw(E, L, F, dtype=dtype, seed=2).requires_grad_()

    def grouped(self) -> Tensor:
        return expert_glu(self.x, self.ids, self.weights, ExpertOperands(self.w13, self.w2, soft_capped))

    def literal(self) -> Tensor:
        return reference.expert_glu(self.x, self.ids, self.weights, self.w13, self.w2, soft_capped)

    def with_gradients(self, out: Tensor) -> list[Tensor]:
        inputs = [self.x, self.weights, self.w13, self.w2]
        probe = torch.arange(out.numel(), dtype=out.dtype, device=out.device).sin().view(out.shape)
        gradients = torch.autograd.grad((out * probe).sum(), inputs, allow_unused=True, materialize_grads=True)
        return [out, *gradients]


@pytest.mark.parametrize(("N", "E", "top"), [(1, 1, 1), (0, 4, 2), (63, 8, 3), (17, 16, 16), (33, 896, 16)])
def test_route_equals_a_full_sort(N: int, E: int, top: int) -> None:
    scores, bias = draw_scores(N, E)
    routing, (ids, cutoff) = route(scores, bias, top), reference.route(scores, bias, top)
    assert isinstance(routing, Routing)
    assert torch.equal(routing.ids.sort(1).values, ids.sort(1).values) and routing.ids.dtype == torch.int64
    assert torch.equal(routing.cutoff, cutoff)


def test_route_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.6, 0.5], [0.1, 0.2, 0.3, 0.4]])
    bias = torch.tensor([-0.5, 0.5, 0.0, 0.05])  # biased: .4 .7 .6 .55 and -.4 .7 .3 .45
    routing = route(scores, bias, 2)
    assert [set(ids) for ids in routing.ids.tolist()] == [{1, 2}, {1, 3}], "chosen by score + bias"
    torch.testing.assert_close(routing.cutoff, torch.tensor([0.55, 0.3]))
    assert torch.equal(route(scores, bias, 4).cutoff, torch.full((2,), -torch.inf))


def test_ties_go_to_the_lower_id() -> None:
    """All scores of three values only: whatever topk does with ties inside a row must not show."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(1, 4, (200, 24), generator=generator) / 4
    for top in (1, 5, 23, 24):
        ids = route(scores, torch.zeros(24), top).ids
        for row, chosen in zip(scores.tolist(), ids.tolist(), strict=True):
            assert sorted(chosen) == sorted(sorted(range(24), key=lambda expert: (-row[expert], expert))[:top])
    saturated = route(torch.ones(3, 6), torch.zeros(6), 2)
    assert saturated.ids.tolist() == [[0, 1]] * 3 and saturated.cutoff.tolist() == [1.0] * 3


def test_a_row_is_listed_the_same_way_in_any_batch() -> None:
    """The order of a token's choices is the order of their sum: a neighbour's tie must not change it."""
    scores, bias = draw_scores(40, 32)
    scores[7] = 0.5  # all of it ties
    together = route(scores, bias * 0, 6).ids
    assert torch.equal(together, torch.cat([route(row, bias * 0, 6).ids for row in scores.split(1)]))


def test_gradient_flows_through_the_weights_alone() -> None:
    scores, bias = draw_scores(9, 8)
    scores, bias = scores.double().requires_grad_(), bias.double().requires_grad_()
    routing = route(scores, bias, 3)
    assert not routing.cutoff.requires_grad
    weights = route_weights(scores, routing.ids, 2.446, True)
    assert torch.autograd.gradcheck(lambda s: route_weights(s, routing.ids, 2.446, True), scores)
    (gradient,) = torch.autograd.grad((weights * draw(9, 3)).sum(), scores)
    unchosen = torch.ones(9, 8, dtype=torch.bool).scatter_(1, routing.ids, False)
    assert torch.equal(gradient[unchosen], torch.zeros(int(unchosen.sum()), dtype=torch.float64))
    torch.testing.assert_close(weights.sum(1), torch.full((9,), 2.446, dtype=torch.float64))


def test_weights_are_raw_scores() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.125]])
    ids = torch.tensor([[2, 0]])
    assert torch.equal(route_weights(scores, ids, 1.0, False), torch.tensor([[0.125, 0.5]]))
    assert torch.equal(route_weights(scores, ids, 2.0, True), torch.tensor([[0.4, 1.6]]))
    assert torch.equal(route_weights(torch.zeros(1, 3), ids), torch.zeros(1, 2)), "0 / (0 + 1e-20)"


@pytest.mark.parametrize("size", SIZES)
def test_grouped_equals_the_reference_with_gradients(size: tuple[int, ...]) -> None:
    case = Case(*size)
    for got, want in zip(*(case.with_gradients(out) for out in (case.grouped(), case.literal())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_experts_without_tokens_get_a_zero_gradient() -> None:
    case = Case(5, 64, 2, 4, 8)
    *_, dw13, dw2 = case.with_gradients(case.grouped())
    idle = torch.bincount(case.ids.flatten(), minlength=64) == 0
    assert idle.sum() >= 54
    assert torch.equal(dw13[idle], torch.zeros_like(dw13[idle])) and torch.equal(dw2[idle], torch.zeros_like(dw2[idle]))


def test_frozen_operands() -> None:
    case = Case(15, 4, 4, 3, 5)
    _, *want = case.with_gradients(case.literal())
    for tensor in (case.w13, case.w2):
        tensor.requires_grad_(False)
    dx, dweights = torch.autograd.grad(
        (case.grouped() * torch.arange(45.0).double().sin().view(15, 3)).sum(), (case.x, case.weights)
    )
    torch.testing.assert_close(dx, want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dweights, want[1], rtol=1e-12, atol=1e-12)


def test_untouched_experts_are_not_read() -> None:
    case = Case(5, 64, 2, 4, 8)
    clean = case.grouped()
    idle = torch.bincount(case.ids.flatten(), minlength=64) == 0
    with torch.no_grad():
        case.w13[idle], case.w2[idle] = torch.nan, torch.nan
    assert torch.equal(case.grouped(), clean)


def test_tokens_do_not_mix() -> None:
    case = Case(63, 8, 3, 17, 6)
    clean = case.grouped()
    with torch.no_grad():
        case.x[40] = torch.nan
    keep = [n for n in range(63) if n != 40]
    assert torch.equal(case.grouped()[keep], clean[keep])


def test_repeats_bit_for_bit() -> None:
    case = Case(63, 8, 3, 17, 6, torch.float32)
    first, second = (case.with_gradients(case.grouped()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_order_of_the_choices_is_the_order_of_the_sum() -> None:
    """An expert chosen twice counts twice, and a reversed list gives the same sum up to rounding."""
    case = Case(15, 4, 4, 3, 5)
    case.ids[0] = 2
    torch.testing.assert_close(case.grouped(), case.literal(), rtol=1e-12, atol=1e-12)
    straight = case.grouped()
    case.ids, case.weights = case.ids.flip(1), case.weights.flip(1)
    torch.testing.assert_close(case.grouped(), straight, rtol=1e-13, atol=1e-13)


def test_bfloat16_rounds_where_the_definition_does() -> None:
    """Products and activation round to bf16, weighting and sum are fp32: the same roundings as the reference's."""
    case = Case(33, 8, 3, 16, 32, torch.bfloat16)
    got, want = case.grouped(), case.literal()
    assert got.dtype == torch.float32
    # The products accumulate in another order, so a bf16 rounding (2^-8 relative) can fall on the other side in four
    # places: gate, up, activation, output.
    assert ((got - want).abs() <= 4 * 2**-8 * want.abs().amax(1, keepdim=True)).all()
    assert (got == want).float().mean() > 0.3
    assert [gradient.dtype for gradient in case.with_gradients(got)[1:]] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    ]


def test_all_experts_at_once_are_the_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with most experts idle, and with operands that want no gradient."""
    for size in ((33, 8, 3, 16, 32), (5, 64, 2, 8, 16)):
        case = Case(*size, torch.bfloat16)
        want = case.with_gradients(case.grouped())
        monkeypatch.setattr(grouped, "at_once", lambda *_: True)
        got = case.with_gradients(case.grouped())
        monkeypatch.undo()
        for x, y in zip(got, want, strict=True):
            assert x.dtype == y.dtype
            # The products' sums may run in another order: one bf16 rounding of each of four, as above.
            assert ((x - y).abs() <= 4 * 2**-8 * y.abs().amax(-1, keepdim=True)).all()
    idle = torch.bincount(case.ids.flatten(), minlength=64) == 0
    assert not got[3][idle].any() and not got[4][idle].any()


@pytest.mark.gpu
def test_all_experts_at_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((33, 8, 3, 16, 32), (5, 64, 2, 8, 16), (2000, 16, 4, 256, 448)):
        case = Case(*size, torch.bfloat16)
        for name in ("ids", "x", "weights", "w13", "w2"):
            tensor = getattr(case, name)
            setattr(case, name, tensor.detach().cuda().requires_grad_(tensor.requires_grad))
        operands = ExpertOperands(case.w13, case.w2, soft_capped)
        assert grouped.at_once(case.x, case.w13)
        found = []
        for all_at_once in (True, False):
            monkeypatch.setattr(grouped, "at_once", lambda *_, form=all_at_once: form)
            out = expert_glu(case.x, case.ids, case.weights, operands, backend="grouped")
            found.append(case.with_gradients(out))
        monkeypatch.undo()
        for x, y in zip(*found, strict=True):
            assert (x - y).float().norm() <= 4 * 2**-8 * y.float().norm()


def test_activation_is_the_callers() -> None:
    case = Case(15, 4, 4, 3, 5)
    got = expert_glu(case.x, case.ids, case.weights, ExpertOperands(case.w13, case.w2, swiglu))
    want = reference.expert_glu(case.x, case.ids, case.weights, case.w13, case.w2, swiglu)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not torch.isclose(got, case.grouped()).all()


def test_user_mistakes() -> None:
    scores, bias = draw_scores(3, 4)
    with pytest.raises(ValueError, match="top 5 of 4"):
        route(scores, bias, 5)
    with pytest.raises(ValueError, match=r"\(3,\) for 4 experts"):
        route(scores, bias[:3], 2)
    case = Case(15, 4, 4, 3, 5)
    with pytest.raises(ValueError, match="do not fit"):
        expert_glu(case.x, case.ids, case.weights, ExpertOperands(case.w13[:, :-1], case.w2, swiglu))
    with pytest.raises(ValueError, match="for 15 tokens"):
        expert_glu(case.x, case.ids[:-1], case.weights[:-1], ExpertOperands(case.w13, case.w2, swiglu))
    with pytest.raises(ValueError, match="one dtype"):
        expert_glu(case.x.float(), case.ids, case.weights, ExpertOperands(case.w13, case.w2, swiglu))
