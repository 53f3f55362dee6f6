"""Attention Residuals: the definition by hand, the one-phase form with its written-out gradient, the two-phase form."""

import math

import pytest
import torch
from torch import Tensor

from rille.ops.attn_res import attn_res, attn_res_weights, reference
from rille.ops.attn_res.two_phase import first_phase, second_phase

EPS = 1e-5
SIZES = [(1, 1, 1), (2, 15, 17), (5, 63, 8), (9, 4, 64), (3, 0, 6)]


def draw(R: int, N: int, D: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources of very different size (a sum of twelve layers beside an embedding), query and gain."""
    generator = torch.Generator().manual_seed(R)
    sources = [torch.randn(N, D, generator=generator, dtype=torch.float64) * 4.0**j for j in range(R)]
    query, gain = (torch.randn(D, generator=generator, dtype=torch.float64) for _ in range(2))
    return [source.to(dtype) for source in sources], query.to(dtype), gain.to(dtype)


def outputs_and_gradients(function, sources: list[Tensor], query: Tensor, gain: Tensor) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (*sources, query, gain)]
    out = function(inputs[:-2], inputs[-2], inputs[-1], EPS)
    probe = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * probe).sum(), inputs)]


def test_values_by_hand() -> None:
    sources, query, gain = draw(3, 2, 4)
    for n in range(2):
        scores = []
        for source in sources:
            row = source[n].tolist()
            root = math.sqrt(sum(v * v for v in row) / 4 + EPS)
            scores.append(sum(v / root * g * q for v, g, q in zip(row, gain.tolist(), query.tolist(), strict=True)))
        total = sum(math.exp(score) for score in scores)
        weights = torch.tensor([math.exp(score) / total for score in scores], dtype=torch.float64)
        mixed = sum(weight * source[n] for weight, source in zip(weights, sources, strict=True))
        torch.testing.assert_close(attn_res_weights(sources, query, gain, EPS)[n], weights, rtol=1e-13, atol=0)
        torch.testing.assert_close(attn_res(sources, query, gain, EPS)[n], mixed, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_one_phase_equals_the_reference_in_float64(size: tuple[int, int, int]) -> None:
    got, want = (outputs_and_gradients(function, *draw(*size)) for function in (attn_res, reference.attn_res))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
def test_fp32_error(size: tuple[int, int, int]) -> None:
    """A score is a sum of D terms of size ~1; its error is a relative error of the weights: 8 D eps in all."""
    R, N, D = size
    sources, query, gain = draw(*size)
    exact = attn_res(sources, query, gain, EPS)
    got = attn_res([source.float() for source in sources], query.float(), gain.float(), EPS)
    largest = torch.stack(sources).abs().amax(0)
    assert got.dtype == torch.float32
    assert ((got - exact).abs() <= 8 * D * 2**-23 * largest + 1e-30).all()


def test_bfloat16_is_rounded_once() -> None:
    sources, query, gain = draw(4, 33, 32, dtype=torch.bfloat16)
    whole = attn_res([source.float() for source in sources], query.float(), gain.float(), EPS)
    assert torch.equal(attn_res(sources, query, gain, EPS), whole.bfloat16())
    assert all(gradient.dtype == torch.bfloat16 for gradient in outputs_and_gradients(attn_res, sources, query, gain))


def test_without_gradients_the_definition_runs() -> None:
    sources, query, gain = draw(4, 33, 32, dtype=torch.float32)
    with torch.no_grad():
        got = attn_res(sources, query, gain, EPS)
    assert torch.equal(got, reference.attn_res(sources, query, gain, EPS))
    # The form that trains adds the same numbers in another order; the bound is that of the fp32 error.
    assert (
        (attn_res(sources, query, gain, EPS) - got).abs() <= 8 * 32 * 2**-23 * torch.stack(sources).abs().amax(0)
    ).all()


def test_one_source_is_returned_as_it_is() -> None:
    sources, query, gain = draw(1, 5, 7)
    assert torch.equal(attn_res(sources, query, gain, EPS), sources[0])


def test_zero_query_averages_and_still_learns() -> None:
    sources, query, gain = draw(4, 9, 6)
    out, *gradients = outputs_and_gradients(attn_res, sources, 0 * query, gain)
    torch.testing.assert_close(out, torch.stack(sources).mean(0), rtol=1e-14, atol=1e-13)
    assert (gradients[-2].abs() > 1e-3).all(), "the query's gradient must not vanish at the initial query"
    assert torch.equal(gradients[-1], 0 * gain)


def test_scores_far_apart_do_not_overflow() -> None:
    sources, query, gain = draw(3, 5, 8, dtype=torch.float32)
    out, *gradients = outputs_and_gradients(attn_res, sources, 1e4 * query, gain)
    assert all(torch.isfinite(tensor).all() for tensor in (out, *gradients))
    chosen = attn_res_weights(sources, 1e4 * query, gain, EPS)
    assert torch.equal(chosen.sum(1), torch.ones(5)) and (chosen.amax(1) > 0.99).all()


def test_tokens_do_not_mix() -> None:
    sources, query, gain = draw(3, 6, 8)
    poisoned = [source.clone() for source in sources]
    poisoned[1][4] = torch.nan
    keep = [0, 1, 2, 3, 5]
    assert torch.equal(attn_res(poisoned, query, gain, EPS)[keep], attn_res(sources, query, gain, EPS)[keep])


def test_a_source_without_gradient_gets_none() -> None:
    sources, query, gain = draw(3, 6, 8)
    sources[0].requires_grad_()
    sources[2].requires_grad_()
    attn_res(sources, query, gain, EPS).sum().backward()
    assert sources[1].grad is None and sources[0].grad is not None and sources[2].grad is not None


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_two_phases_equal_one(blocks: int) -> None:
    """All sites of a block: the first sees finished blocks only, the others a running sum that grows."""
    Q, N, D = 4, 17, 12
    sources, *_ = draw(blocks + Q - 1, N, D)
    finished, updates = sources[:blocks], sources[blocks:]
    queries, gains = torch.randn(2, Q, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def in_one_phase(inputs: list[Tensor]) -> Tensor:
        sums = torch.stack(inputs[blocks:-2]).cumsum(0)
        mixes = [
            attn_res([*inputs[:blocks], *sums[max(q - 1, 0) : q]], inputs[-2][q], inputs[-1][q], EPS) for q in range(Q)
        ]
        return torch.stack(mixes)

    def in_two_phases(inputs: list[Tensor]) -> Tensor:
        sums = torch.stack(inputs[blocks:-2]).cumsum(0)
        phase = first_phase(inputs[:blocks], inputs[-2], inputs[-1], EPS)
        partials = [None, *sums]
        mixes = [second_phase(phase, q, partials[q], inputs[-2][q], inputs[-1][q], EPS) for q in range(Q)]
        return torch.stack(mixes)

    results = []
    for function in (in_one_phase, in_two_phases):
        inputs = [tensor.detach().requires_grad_() for tensor in (*finished, *updates, queries, gains)]
        out = function(inputs)
        probe = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape)
        results.append([out, *torch.autograd.grad((out * probe).sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12 * b.detach().abs().max().item())


def test_bad_sources() -> None:
    query = torch.ones(4)
    with pytest.raises(ValueError, match="no sources"):
        attn_res([], query, query, EPS)
    with pytest.raises(ValueError, match="one shape"):
        attn_res([torch.ones(3, 4), torch.ones(2, 4)], query, query, EPS)
    with pytest.raises(ValueError, match="one dtype"):
        attn_res([torch.ones(3, 4), torch.ones(3, 4).double()], query, query, EPS)
    with pytest.raises(ValueError, match=r"width \(5,\)"):
        attn_res_weights([torch.ones(3, 5)], query, query, EPS)
