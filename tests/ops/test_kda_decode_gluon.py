"""The Gluon kernels of decode and verify, run by Python on a CPU, against the slow twin."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from rille.ops import chain_gluon
from rille.ops.kda import decode as interface
from rille.ops.kda import decode_gluon, decode_launch, verify_gluon
from rille.ops.kda.decode import kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_operands import Pools, Projected, Remembered
from tests.ops import gluon_on_cpu
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.test_kda_decode import CASES, assert_pools_close, at, make_inputs, make_layer, make_pools

PROGRAMS = 3  # that share the heads of all rows: each has several, and not always the same head


@pytest.fixture(params=["late", "early"])
def kernels(request, monkeypatch):
    """decode and verify launch the Gluon kernels on CPU tensors; copies of verify arrive late or early."""
    _, decode, verify = gluon_on_cpu.kernels_of(chain_gluon, decode_gluon, verify_gluon)
    staying = Kernel(verify.verify, request.param == "early", PROGRAMS)
    monkeypatch.setattr(decode_launch, "decode_gluon", SimpleNamespace(decode=Kernel(decode.decode)))
    monkeypatch.setattr(decode_launch, "verify_gluon", SimpleNamespace(verify=staying))
    monkeypatch.setattr(interface, "obstacle", lambda *_: None)


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_verify_commit_decode(kernels, sizes):
    layer = make_layer(**sizes)
    pools, again = make_pools(layer), make_pools(layer)
    slots, accepted = torch.tensor([3, -1, 0, 4], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for seed, (tokens, count) in enumerate([(4, [4, 0, 2, 1]), (3, [0, 3, 3, 2]), (1, [1, 1, 0, 1])]):
        inputs = make_inputs(layer, 4, tokens, seed=seed)
        y_BTV = kda_verify(inputs, layer, pools, slots, accepted, backend="gluon")
        want_BTV = kda_verify(inputs, layer, again, slots, accepted, backend="reference")
        torch.testing.assert_close(y_BTV, want_BTV)
        assert not y_BTV[1].any()
        accepted = torch.tensor(count, dtype=torch.int32)
    for each, backend in ((pools, "gluon"), (again, "reference")):
        kda_commit(layer, each, slots, accepted, backend=backend)
    assert_pools_close(pools, again)
    inputs = at(make_inputs(layer, 4, 1), (slice(None), 0))
    y_BV, want_BV = (
        kda_decode(inputs, layer, each, slots, backend=backend)
        for each, backend in ((pools, "gluon"), (again, "reference"))
    )
    torch.testing.assert_close(y_BV, want_BV)
    assert_pools_close(pools, again)


def test_bf16_and_a_state_that_does_not_fit_ahead(kernels, monkeypatch):
    monkeypatch.setattr(decode_launch, "fits_ahead", lambda *_: False)
    layer = make_layer()
    pools, again = make_pools(layer, torch.bfloat16), make_pools(layer, torch.bfloat16)
    slots, accepted = torch.tensor([2, 0, -1, 1]), torch.zeros(4, dtype=torch.int64)
    for seed in range(2):
        inputs = make_inputs(layer, 4, 4, dtype=torch.bfloat16, seed=seed)
        y_BTV = kda_verify(inputs, layer, pools, slots, accepted, backend="gluon")
        want_BTV = kda_verify(inputs, layer, again, slots, accepted, backend="reference")
        torch.testing.assert_close(y_BTV, want_BTV, rtol=3e-2, atol=3e-2)
        accepted = torch.tensor([9, 1, 0, -1])
    assert_pools_close(pools, again, rtol=2e-2, atol=2e-2)


def test_eight_tokens(kernels):
    """Drafts before the next state is asked for, between, and after the next writes are. The first row is idle: there a
    program comes to another head."""
    layer = make_layer()
    pools, again = make_pools(layer, tokens=8), make_pools(layer, tokens=8)
    slots, accepted = torch.tensor([-1, 2, 0, 1]), torch.zeros(4, dtype=torch.int64)
    for seed in range(3):
        inputs = make_inputs(layer, 4, 8, seed=seed)
        y_BTV = kda_verify(inputs, layer, pools, slots, accepted, backend="gluon")
        want_BTV = kda_verify(inputs, layer, again, slots, accepted, backend="reference")
        torch.testing.assert_close(y_BTV, want_BTV)
        accepted = torch.tensor([1, 8, 5, 0])
    assert_pools_close(pools, again)


def test_slots_at_odd_places_are_refused(kernels):
    layer = make_layer()
    pools = make_pools(layer)
    shifted = torch.empty(pools.tails.numel() + 1)[1:].view_as(pools.tails).copy_(pools.tails)
    odd = Pools(pools.states, shifted, pools.past)
    with pytest.raises(ValueError, match="tails must start at multiples of 16 bytes"):
        kda_verify(make_inputs(layer, 1, 2), layer, odd, torch.tensor([0]), torch.tensor([0]), backend="gluon")
    with pytest.raises(ValueError, match="tails must start at multiples of 16 bytes"):
        kda_commit(layer, odd, torch.tensor([0]), torch.tensor([0]), backend="gluon")


@pytest.mark.parametrize("W", [1, 4])
def test_pools_made_whole_lie_right(W):
    """At the smallest sizes, and the first slots of them alone, as the engine takes them."""
    layer = make_layer(H=1, K=16, V=16, W=W)
    states, tails = torch.empty(3, 1, 16, 16), torch.empty(3, W - 1, 48, dtype=torch.bfloat16)
    past = Remembered.new(3, 1, layer, torch.bfloat16)
    decode_launch.check_slots(*(x[:2] for x in (states, tails, past.qkv, past.z, past.u)))


def spaced_states(pools, gap):
    """The pools with NaN between the states of slots, and what lies there."""
    slots, size = pools.states.shape[0], pools.states[0].numel()
    wide = torch.full((slots, size + gap), float("nan"))
    states = wide[:, :size].view_as(pools.states).copy_(pools.states)
    return Pools(states, pools.tails, pools.past), wide[:, size:]


def test_states_with_gaps_between_slots(kernels):
    layer = make_layer()
    pools, again = make_pools(layer), make_pools(layer)
    apart, between = spaced_states(pools, 32)
    slots = torch.tensor([1, 3])
    for seed, accepted in enumerate(([0, 0], [2, 0])):
        call = make_inputs(layer, 2, 3, seed=seed), layer
        y_BTV = kda_verify(*call, apart, slots, torch.tensor(accepted), backend="gluon")
        want_BTV = kda_verify(*call, again, slots, torch.tensor(accepted), backend="reference")
        torch.testing.assert_close(y_BTV, want_BTV)
    assert_pools_close(apart, again)
    assert between.isnan().all()


def test_states_that_are_no_table_are_refused(kernels):
    layer = make_layer(K=64)
    apart, _ = spaced_states(make_pools(layer), 32)
    with pytest.raises(ValueError, match="a multiple of 64 apart"):
        kda_verify(make_inputs(layer, 1, 2), layer, apart, *torch.zeros(2, 1, dtype=torch.int64), backend="gluon")


def test_inputs_at_odd_places(kernels):
    layer = make_layer()
    pools, again = make_pools(layer), make_pools(layer)
    inputs, slots, accepted = make_inputs(layer, 2, 3), torch.tensor([1, 3]), torch.tensor([0, 0])
    odd = Projected(*(torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in vars(inputs).values()))
    y_BTV = kda_verify(odd, layer, pools, slots, accepted, backend="gluon")
    torch.testing.assert_close(y_BTV, kda_verify(inputs, layer, again, slots, accepted, backend="reference"))


@pytest.mark.parametrize("K, V, tokens, ahead", [(128, 128, 8, True), (128, 128, 32, False), (128, 256, 16, False)])
def test_what_fits_beside_the_next_state(K, V, tokens, ahead):
    assert decode_launch.fits_ahead(K, V, tokens, tokens, 2) == ahead
