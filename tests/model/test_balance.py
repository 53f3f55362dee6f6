"""Quantile Balancing: the report's worked example, convergence at K3's size, histogram against exact, pooling."""

import pytest
import torch

from rille.model.balance import (
    BINS,
    Counts,
    exact_bias,
    histogram_bias,
    load_violation,
    sign_bias,
    update_biases,
)
from rille.ops.moe import required_bias_histogram, route

# Figure 5 of the report, digitised: affinities of 8 tokens to 4 experts, one expert a token, arbitrary unit
FIGURE_5 = torch.tensor(
    [
        [32, 12, 5, 4],
        [16, 31, 7, 8],
        [14, 21, 5, 20],
        [32, 14, 7, 6],
        [21, 12, 5, 20],
        [18, 31, 13, 4],
        [22, 10, 21, 2],
        [16, 8, 21, 12],
    ],
    dtype=torch.float32,
)


def loads(scores_NE, bias_E, active):
    routing = route(scores_NE, bias_E, active)
    return torch.bincount(routing.ids.flatten(), minlength=scores_NE.shape[1]), routing


def test_figure_5_balances_in_one_step_and_stays():
    before, routing = loads(FIGURE_5, torch.zeros(4), 1)
    assert before.tolist() == [4, 3, 1, 0]
    bias = exact_bias(FIGURE_5, routing.cutoff, 1)
    assert torch.allclose(bias, torch.tensor([-2.75, -2.75, 3.25, 2.25]))
    after, balanced = loads(FIGURE_5, bias, 1)
    assert after.tolist() == [2, 2, 2, 2]
    assert balanced.ids.flatten().tolist() == [0, 1, 3, 0, 3, 1, 2, 2]
    assert torch.allclose(exact_bias(FIGURE_5, balanced.cutoff, 1), bias)


def synthetic_scores(tokens=20_000, experts=896, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(experts, generator=generator)
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + shift)


def top_loads(scores_NE, bias_E, active):
    """As `loads`, by torch.topk: five times faster at this size, and random scores have no ties to order."""
    biased, ids = torch.topk(scores_NE + bias_E, active + 1)
    return torch.bincount(ids[:, :active].flatten(), minlength=scores_NE.shape[1]), biased[:, active]


@pytest.mark.parametrize("rule", ["exact", "histogram"])
def test_896_experts_balance_within_five_updates(rule):
    scores, bias = synthetic_scores(), torch.zeros(896)
    violations = []
    for _ in range(6):
        load, cutoff = top_loads(scores, bias, 16)
        violations.append(load_violation(load))
        if rule == "exact":
            bias = exact_bias(scores, cutoff, 16)
        else:
            bias = histogram_bias(required_bias_histogram(scores, cutoff, bias, BINS), bias, 16)
    assert violations[0] > 10
    assert violations[5] < 0.1, violations


def test_the_sign_rule_is_slow():
    scores, bias = synthetic_scores(tokens=2_000), torch.zeros(896)
    for _ in range(5):
        bias = sign_bias(bias, loads(scores, bias, 16)[0], 1e-3)
    assert load_violation(loads(scores, bias, 16)[0]) > 5


@pytest.mark.parametrize(("tokens", "experts", "active"), [(4_001, 16, 4), (5_000, 64, 6), (3_000, 7, 1)])
def test_histogram_is_within_one_bin_of_exact(tokens, experts, active):
    scores = synthetic_scores(tokens, experts, seed=1)
    old = torch.randn(experts, generator=torch.Generator().manual_seed(2)) * 0.1
    routing = route(scores, old, active)
    exact = exact_bias(scores, routing.cutoff, active)
    ours = histogram_bias(required_bias_histogram(scores, routing.cutoff, old, BINS), old, active)
    width = float(old.max() - old.min() + 2) / BINS
    assert float((ours - exact).abs().max()) <= width + 1e-6


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "active"), [(15, 5, 1), (180, 6, 1), (84, 34, 17), (4_096, 16, 4)])
def test_it_is_so_where_the_share_of_an_expert_is_a_whole_number_of_tokens_too(tokens, experts, active, whole):
    """Few tokens lie many bins apart: reading a rank beside the right one shows."""
    tokens -= not whole
    for seed in range(10):
        scores = synthetic_scores(tokens, experts, seed=seed)
        old = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.1
        routing = route(scores, old, active)
        ours = histogram_bias(required_bias_histogram(scores, routing.cutoff, old, BINS), old, active)
        off_E = ours - exact_bias(scores, routing.cutoff, active)
        width = float(old.max() - old.min() + 2) / BINS  # each is off by one at most, the means differ by one at most
        assert float(off_E.max() - off_E.min()) <= 2 * width + 1e-6


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_counts_pool_to_the_same_bits_for_any_sharding(parts):
    scores = synthetic_scores(1_000, 32, seed=3)
    bias = torch.linspace(-0.1, 0.1, 32)
    pooled, whole = Counts(), Counts()
    for piece in scores.chunk(parts):
        routing = route(piece, bias, 4)
        pooled.add(0, routing.ids, piece, routing.cutoff, bias)
    routing = route(scores, bias, 4)
    whole.add(0, routing.ids, scores, routing.cutoff, bias)
    assert torch.equal(pooled.load[0], whole.load[0])
    assert torch.equal(pooled.histogram[0], whole.histogram[0])
    assert pooled.load[0].dtype == pooled.histogram[0].dtype == torch.int64
    assert int(pooled.load[0].sum()) == 4_000 and pooled.histogram[0].sum(1).tolist() == [1_000] * 32


def test_update_writes_in_place_and_the_average_moves_part_of_the_way():
    scores, bias = synthetic_scores(1_000, 32), torch.zeros(32)
    routing, counts = route(scores, bias, 4), Counts()
    counts.add(5, routing.ids, scores, routing.cutoff, bias)
    target = histogram_bias(counts.histogram[5], bias, 4)
    untouched, averaged = bias.clone(), bias.clone()
    update_biases({5: untouched}, counts, 4, "none")
    update_biases({5: averaged}, counts, 4, "quantile", ema=0.9)
    update_biases({5: bias}, counts, 4, "quantile")
    assert torch.equal(untouched, torch.zeros(32))
    assert torch.allclose(bias, target)
    assert torch.allclose(averaged, 0.1 * target, atol=1e-6)
    with pytest.raises(ValueError, match="unknown rule"):
        update_biases({5: bias}, counts, 4, "quantil")


def test_all_experts_active_needs_no_bias():
    scores = synthetic_scores(100, 4)
    routing, counts, bias = route(scores, torch.zeros(4), 4), Counts(), torch.zeros(4)
    counts.add(0, routing.ids, scores, routing.cutoff, bias)
    update_biases({0: bias}, counts, 4, "quantile")
    assert torch.isfinite(bias).all()
