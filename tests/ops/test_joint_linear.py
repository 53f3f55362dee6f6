"""Products of one input as one, beside the products one by one."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rille.model.allocate import Allocate, lay_together
from rille.ops.joint_linear import joint_linear, joint_product, lie_together, warn_apart

HEIGHTS = (6, 6, 5, 8, 1)
GROUPS = ((0, 1, 2), (3,), (4,))


def matrices(columns: int = 10) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = Allocate(torch.float64, "cpu").together(columns, *HEIGHTS)
    for parameter in made:
        torch.nn.init.normal_(parameter)
    return made


def grouped(weights) -> list[list[Tensor]]:
    return [[weights[n] for n in group] for group in GROUPS]


def expected(x: Tensor, weights) -> list[Tensor]:
    return [torch.cat([linear(x, w) for w in group], dim=-1) for group in grouped(weights)]


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("joint", [True, False, None])
def test_results_are_those_of_single_products(tokens, joint):
    weights, x = matrices(), torch.randn(tokens, 10, dtype=torch.float64)
    with torch.no_grad():
        found = joint_linear(x, grouped(weights), joint=joint)
    for one, other in zip(found, expected(x, weights), strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_all_is_one_product_whose_rows_are_aligned():
    weights, x = matrices(), torch.randn(3, 10, dtype=torch.float64)
    with torch.no_grad():
        found = joint_linear(x, grouped(weights), joint=True)
    assert {one.untyped_storage().data_ptr() for one in found} == {found[0].untyped_storage().data_ptr()}
    assert all(one.stride(0) % 16 == 0 for one in found)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_single_products(frozen):
    weights, x = matrices(), torch.randn(7, 10, dtype=torch.float64, requires_grad=not frozen)
    results = joint_linear(x, grouped(weights), joint=True), expected(x, weights)
    pull = [torch.randn_like(one) for one in results[0]]
    wanted = weights if frozen else [x, *weights]
    gradients = [torch.autograd.grad([(a * b).sum() for a, b in zip(r, pull, strict=True)], wanted) for r in results]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_result_that_nobody_uses_leaves_the_others_gradients():
    weights, x = matrices(), torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    joint_linear(x, grouped(weights), joint=True)[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.cat(list(weights[:3])).detach().sum(0).expand(7, -1))
    assert weights[3].grad is None and weights[0].grad is not None


def test_updates_in_place_are_seen():
    weights, x = matrices(), torch.randn(2, 10, dtype=torch.float64)
    with torch.no_grad():
        weights[1].mul_(3)
        found = joint_linear(x, grouped(weights), joint=True)
    torch.testing.assert_close(found[0], expected(x, weights)[0])


def test_matrices_that_were_parted_still_multiply_right_and_say_so():
    weights, x = [copy.deepcopy(w) for w in matrices()], torch.randn(2, 10, dtype=torch.float64)
    assert not lie_together(weights)
    warn_apart.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match=r"model.prepare\(\)"):
        found = joint_linear(x, grouped(weights), joint=True)
    for one, other in zip(found, expected(x, weights), strict=True):
        torch.testing.assert_close(one, other)


def test_another_order_or_a_matrix_left_out_is_never_taken_for_one():
    weights = matrices()
    for order in ((1, 0), (0, 2), (0, 1, 3)):
        assert not lie_together([weights[n] for n in order])
    assert lie_together(weights)


def test_nothing_beyond_the_memory_is_read():
    """A stack without padding rows: five rows cannot be read as sixteen."""
    part = torch.nn.Parameter(torch.randn(5, 4))
    assert not lie_together([part])


def test_compiled_models_see_one_operation():
    weights = matrices()

    @torch.compile(backend="eager", fullgraph=True)
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return joint_linear(x, grouped(weights), joint=True)

    x = torch.randn(3, 10, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(both(x)[0], expected(x, weights)[0])


def test_the_operation_keeps_the_rules_of_torch():
    weights, x = matrices(), torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth refuses to share a storage
    torch.library.opcheck(joint_product.registered, (x, weights, False), test_utils=checks)


@pytest.mark.gpu
def test_prepare_lays_matrices_together_again():
    weights = [torch.nn.Parameter(w.detach().cuda()) for w in matrices()]
    before = [w.detach().clone() for w in weights]
    assert not lie_together(weights)
    lay_together(*weights)
    assert lie_together(weights) and all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
