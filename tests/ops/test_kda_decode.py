"""Decode and verify: the slow twin against the packed ops, the kernels against the slow twin, verify against steps."""

import pytest
import torch

from rille.ops.conv import PooledTail, short_conv
from rille.ops.kda import Gate, PooledState, kda
from rille.ops.kda.decode import choose_backend, kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected, Remembered
from rille.ops.norm import gated_rms_norm
from rille.packing import Packing

SLOTS = 5


def interpreter() -> None:
    """The Triton twins run in the interpreter. On a card the Gluon kernels do: `test_kda_decode_gpu.py`."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the twins are tested where there is no card")


def make_layer(H=2, K=16, V=32, W=4, lower_bound: float | None = -5.0, seed=0) -> DecodeLayer:
    g = torch.Generator().manual_seed(seed)
    gate = Gate(torch.randn(H + 1, generator=g) * 0.2, torch.randn(H, K, generator=g), lower_bound)
    conv = torch.randn(2 * H * K + H * V, W, generator=g) * 0.5
    return DecodeLayer(conv, gate, torch.rand(V, generator=g) + 0.5, 1e-5)


def make_inputs(layer: DecodeLayer, *lead: int, dtype=torch.float32, seed=1, scale=1.0) -> Projected:
    g = torch.Generator().manual_seed(seed)
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    widths = (layer.conv_weight.shape[0], H * K, H, H * V)
    return Projected(*((torch.randn(*lead, n, generator=g) * scale).to(dtype) for n in widths))


def make_pools(layer: DecodeLayer, dtype=torch.float32, tokens=4, seed=2) -> Pools:
    """Pools whose slots lie apart, with NaN between them and in what is not yet remembered."""
    g = torch.Generator().manual_seed(seed)
    (H, K), V, (C, W) = layer.gate.dt_bias.shape, layer.norm_weight.shape[0], layer.conv_weight.shape
    states = torch.full((SLOTS, 2, H, V, K), float("nan"))[:, 0]
    tails = torch.full((SLOTS, 2, W - 1, C), float("nan"), dtype=dtype)[:, 1]
    states.copy_(torch.randn(SLOTS, H, V, K, generator=g) * 0.3)
    tails.copy_(torch.randn(SLOTS, W - 1, C, generator=g))
    past = Remembered.new(SLOTS, tokens, layer, dtype)
    for x in (past.qkv, past.z, past.u):
        x.fill_(float("nan"))
    return Pools(states, tails, past)


def at(inputs: Projected, index) -> Projected:
    return Projected(inputs.qkv[index], inputs.z[index], inputs.b[index], inputs.gate[index])


def assert_pools_close(got: Pools, want: Pools, **tolerance) -> None:
    torch.testing.assert_close(got.states, want.states, **tolerance)
    torch.testing.assert_close(got.tails, want.tails, rtol=0, atol=0)
    if got.past is not None and want.past is not None:
        for name in ("qkv", "z"):
            torch.testing.assert_close(
                getattr(got.past, name), getattr(want.past, name), rtol=0, atol=0, equal_nan=True
            )
        torch.testing.assert_close(got.past.u, want.past.u, equal_nan=True, **tolerance)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_slow_twin_is_the_packed_ops(lower_bound):
    layer = make_layer(lower_bound=lower_bound)
    inputs, pools, again = make_inputs(layer, 3), make_pools(layer), make_pools(layer)
    slots = torch.tensor([4, 0, 2])
    y_BV = kda_decode(inputs, layer, pools, slots, backend="reference")

    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    packing = Packing.of([1, 1, 1], [9, 9, 9])
    x_NC, _ = short_conv(inputs.qkv, layer.conv_weight, packing, PooledTail(again.tails, slots))
    q, k, v = (x.unflatten(-1, (H, -1)) for x in x_NC.split([H * K, H * K, H * V], -1))
    z, gate = inputs.z.unflatten(-1, (H, K)), inputs.gate.unflatten(-1, (H, V))
    o, _ = kda(q, k, v, z, inputs.b, layer.gate, packing, PooledState(again.states, slots))
    torch.testing.assert_close(y_BV, gated_rms_norm(o, gate, layer.norm_weight, layer.eps).flatten(1))
    assert_pools_close(pools, again)


CASES = [
    dict(),
    dict(lower_bound=None),
    dict(K=32, V=16),
    dict(W=1),
    dict(W=2),
    dict(W=3),
    dict(H=1, K=64, V=128),
]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_decode_kernel(sizes):
    interpreter()
    layer = make_layer(**sizes)
    pools, again = make_pools(layer), make_pools(layer)
    slots = torch.tensor([3, -1, 0, 4], dtype=torch.int32)
    for step in range(3):
        inputs = make_inputs(layer, 4, seed=step)
        y_BV = kda_decode(inputs, layer, pools, slots, backend="triton")
        torch.testing.assert_close(y_BV, kda_decode(inputs, layer, again, slots, backend="reference"))
        assert not y_BV[1].any()
    assert_pools_close(pools, again)


def test_decode_kernel_bf16():
    """The interpreter truncates where the card rounds: a bf16 unit of q, k, v and o."""
    interpreter()
    layer = make_layer()
    inputs, slots = make_inputs(layer, 3, dtype=torch.bfloat16), torch.tensor([1, 2, 0])
    pools, again = make_pools(layer, torch.bfloat16), make_pools(layer, torch.bfloat16)
    y_BV = kda_decode(inputs, layer, pools, slots, backend="triton")
    want_BV = kda_decode(inputs, layer, again, slots, backend="reference")
    assert y_BV.dtype == torch.bfloat16
    torch.testing.assert_close(y_BV.float(), want_BV.float(), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(pools.tails, again.tails, rtol=0, atol=0)


def test_rows_of_a_wider_tensor():
    """The four inputs may be columns of one projection."""
    interpreter()
    layer = make_layer()
    inputs = make_inputs(layer, 3)
    parts = [inputs.qkv, inputs.z, inputs.b, inputs.gate]
    columns = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
    slots = torch.tensor([1, 2, 0])
    y_BV = kda_decode(Projected(*columns), layer, make_pools(layer), slots, backend="triton")
    torch.testing.assert_close(y_BV, kda_decode(inputs, layer, make_pools(layer), slots, backend="triton"))


ROUNDS = [[0, 0, 0, 0], [4, 0, 1, 2], [2, 3, 9, 4], [0, 4, 4, 1]]


@pytest.mark.parametrize("sizes", [dict(), dict(lower_bound=None), dict(W=2), dict(W=1), dict(K=32, V=16)], ids=str)
def test_verify_kernel(sizes):
    """Rounds of four drafts with every number of acceptances, against the slow twin."""
    interpreter()
    layer, slots = make_layer(**sizes), torch.tensor([3, 0, -1, 2])
    pools, again = make_pools(layer), make_pools(layer)
    for round_, accepted in enumerate(ROUNDS):
        inputs, accepted_B = make_inputs(layer, 4, 4, seed=round_), torch.tensor(accepted, dtype=torch.int32)
        y_BTV = kda_verify(inputs, layer, pools, slots, accepted_B, backend="triton")
        want_BTV = kda_verify(inputs, layer, again, slots, accepted_B, backend="reference")
        torch.testing.assert_close(y_BTV, want_BTV, rtol=1e-4, atol=1e-5)
        assert_pools_close(pools, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_verify_equals_single_steps(backend, lower_bound):
    """Drafts that are rejected leave nothing behind; those accepted give what single steps give, bit for bit."""
    if backend == "triton":
        interpreter()
    layer, slots = make_layer(lower_bound=lower_bound), torch.tensor([1, 4, 0])
    tried, stepped = make_pools(layer), make_pools(layer)
    accepted = torch.zeros(3, dtype=torch.int64)
    exact = dict(rtol=0, atol=0) if backend == "triton" else dict(rtol=1e-5, atol=1e-6)
    for round_, counts in enumerate([[4, 1, 3], [2, 4, 1], [1, 3, 4]]):
        drafts = make_inputs(layer, 3, 4, seed=10 + round_)
        y_BTV = kda_verify(drafts, layer, tried, slots, accepted, backend=backend)
        accepted = torch.tensor(counts)
        for t in range(4):
            going = torch.where(accepted > t, slots, -1)
            y_BV = kda_decode(at(drafts, (slice(None), t)), layer, stepped, going, backend=backend)
            torch.testing.assert_close(y_BTV[:, t][accepted > t], y_BV[accepted > t], **exact)
    kda_commit(layer, tried, slots, accepted, backend=backend)
    torch.testing.assert_close(tried.states, stepped.states, **exact)
    torch.testing.assert_close(tried.tails, stepped.tails, rtol=0, atol=0)


def test_fewer_drafts_than_room():
    interpreter()
    layer, slots = make_layer(), torch.tensor([1, 4])
    pools, again = make_pools(layer), make_pools(layer)
    for accepted, T in ([0, 0], 3), ([3, 2], 1), ([1, 0], 2):
        inputs = make_inputs(layer, 2, T, seed=T)
        got = kda_verify(inputs, layer, pools, slots, torch.tensor(accepted), backend="triton")
        want = kda_verify(inputs, layer, again, slots, torch.tensor(accepted), backend="reference")
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_pools_close(pools, again, rtol=1e-4, atol=1e-5)


def test_ops_for_compiled_models():
    """What torch.compile knows of the two launches: shapes without running, and which arguments change."""
    interpreter()
    from rille.ops.kda import decode_launch

    layer, slots = make_layer(), torch.tensor([1, 4])
    pools = make_pools(layer)
    weights = (layer.conv_weight, layer.gate.A_log, layer.gate.dt_bias, layer.norm_weight, pools.tails, pools.states)
    past = (pools.past.qkv, pools.past.z, pools.past.u, torch.tensor([0, 0]))
    tests = ("test_schema", "test_faketensor")
    for op, lead, more in ((decode_launch.decode_op, (2,), ()), (decode_launch.verify_op, (2, 3), past)):
        inputs = make_inputs(layer, *lead)
        rows = (inputs.qkv, inputs.z, inputs.b, inputs.gate)
        torch.library.opcheck(op.registered, (*rows, *more, *weights, slots, -5.0, 1e-5, "triton"), test_utils=tests)


@pytest.mark.parametrize("logit", [12.0, -12.0, 200.0, -200.0])
def test_saturated_gate(logit):
    interpreter()
    layer = make_layer()
    inputs = make_inputs(layer, 3)
    inputs = Projected(inputs.qkv, torch.full_like(inputs.z, logit), inputs.b, inputs.gate)
    pools, again, slots = make_pools(layer), make_pools(layer), torch.tensor([1, 2, 0])
    got = kda_decode(inputs, layer, pools, slots, backend="triton")
    torch.testing.assert_close(got, kda_decode(inputs, layer, again, slots, backend="reference"))
    assert_pools_close(pools, again)


def test_zero_keys_and_a_neighbour_of_nan():
    interpreter()
    layer = make_layer()
    inputs = make_inputs(layer, 3)
    inputs.qkv[0] = 0
    inputs.qkv[1] = float("nan")
    pools, again, slots = make_pools(layer), make_pools(layer), torch.tensor([1, 2, 0])
    pools.tails[1], again.tails[1] = 0, 0
    got = kda_decode(inputs, layer, pools, slots, backend="triton")
    want = kda_decode(inputs, layer, again, slots, backend="reference")
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all() and pools.states[[0, 1]].isfinite().all()


def test_refusals():
    layer = make_layer()
    inputs, pools, slots = make_inputs(layer, 3), make_pools(layer), torch.tensor([1, 2, 0])
    with pytest.raises(ValueError, match=r"z has shape \(3, 16\), expected \(3, 32\)"):
        kda_decode(Projected(inputs.qkv, inputs.z[:, :16], inputs.b, inputs.gate), layer, pools, slots)
    with pytest.raises(ValueError, match="share one dtype"):
        kda_decode(inputs, layer, Pools(pools.states, pools.tails.half()), slots)
    with pytest.raises(ValueError, match="gluon.*cannot run"):
        kda_decode(inputs, layer, pools, slots, backend="gluon")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        kda_decode(inputs, layer, pools, slots, backend="cuda")
    with pytest.raises(ValueError, match="pools.past is None"):
        kda_verify(make_inputs(layer, 3, 4), layer, Pools(pools.states, pools.tails), slots, slots)
    with pytest.raises(ValueError, match="5 tokens in a call, room to remember 4"):
        kda_verify(make_inputs(layer, 3, 5), layer, pools, slots, slots)
    assert choose_backend(inputs.qkv, layer)[0] == "reference"
