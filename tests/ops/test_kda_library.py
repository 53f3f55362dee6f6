"""The ops of KDA and of its convolution hold the rules of torch.library: their schemas say what they write to, their
results are known without running, and gradients are those that a compiler has traced. On a card they are asked there.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rille.ops.conv import launch as conv_launch
from rille.ops.kda import Places, decode_launch
from rille.ops.kda import function as gradients
from rille.ops.kda.forward import INTERPRET, forward_in_pool_op, forward_op, second_pass
from rille.packing import Packing
from tests.ops.test_kda_arguments import DEVICE, LENGTHS, H, K, N, S, V, draw
from tests.ops.test_kda_decode import make_inputs, make_layer, make_pools
from tests.ops.test_kda_surroundings import learning

pytestmark = [] if INTERPRET else pytest.mark.gpu


@pytest.fixture
def poisoned_memory() -> None:
    """None here: what hands out poison cannot be traced."""


RULES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("learns", [False, True])
def test_forward_holds_the_rules_of_torch_library(learns: bool, bound: float | None) -> None:
    """Schema, what is known of results without running, and gradients where a compiler has traced both passes."""
    x, packing = draw(), Packing.of(LENGTHS, device=DEVICE)
    x = learning(x) if learns else x
    chunks = packing.chunks(64)
    indices = (chunks.spans, packing.starts, packing.longest_first, chunks.first)
    *tokens, state = x.values()
    rules = RULES if INTERPRET else RULES[:3]  # gradients of bf16 are compared too closely
    arguments = (*tokens, bound, *indices, state, [], 2 if learns else 1)
    assert gradients.kda_backward_op.__name__ == "kda_backward", "its module gives the op its gradients"
    torch.library.opcheck(forward_op.registered, arguments, test_utils=rules)
    if not learns:
        slots, kept = torch.tensor([3, 1, 0], device=DEVICE), torch.tensor([4, 5, 6], device=DEVICE)
        places = Places.of(packing, [[5], [], [64, 66]])
        checkpoints, between = places.at(slots, kept)
        pool = torch.randn(7, H, V, K, device=DEVICE)
        given = (*tokens, bound, places.spans, *indices[1:], pool, slots, checkpoints, [], second_pass(between))
        torch.library.opcheck(forward_in_pool_op.registered, given, test_utils=RULES)


@pytest.mark.parametrize("W", [1, 4])
def test_the_convolution_holds_the_rules_of_torch_library(W: int) -> None:
    packing, C = Packing.of(LENGTHS, device=DEVICE), 8
    x, weight, tail = (torch.randn(shape, device=DEVICE) for shape in ((N, C), (C, W), (S, W - 1, C)))
    indices, pool, slots = (packing.starts, packing.sequence_of), torch.randn(5, W - 1, C, device=DEVICE), [4, 0, 2]
    for given in (None, tail):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        torch.library.opcheck(conv_launch.short_conv.registered, (*leaves, *indices, given), test_utils=RULES)
        back = (torch.randn_like(x), given, x, weight, *indices, given)
        torch.library.opcheck(conv_launch.short_conv_backward.registered, back, test_utils=RULES)
    pooled = (x, weight, *indices, pool, torch.tensor(slots, device=DEVICE))
    torch.library.opcheck(conv_launch.short_conv_pooled.registered, pooled, test_utils=RULES)


@pytest.mark.skipif(not INTERPRET, reason="on a card the Gluon kernels, by the gate of benchmarks/ops/kda.py")
def test_decode_and_verify_hold_the_rules_of_torch_library() -> None:
    layer, slots = make_layer(), torch.tensor([1, -1, 0])
    gate, pools = layer.gate, make_pools(layer)
    assert pools.past is not None
    parameters = (layer.conv_weight, gate.A_log, gate.dt_bias, layer.norm_weight)
    rest = (*parameters, pools.tails, pools.states.clone(), slots, gate.lower_bound, layer.eps, "triton")
    past = [x.zero_() for x in (pools.past.qkv, pools.past.z, pools.past.u)]
    for lead, more in (((3,), ()), ((3, 2), (*past, torch.tensor([1, 0, 2])))):
        inputs = make_inputs(layer, *lead)
        rows = (inputs.qkv, inputs.z, inputs.b, inputs.gate)
        op = decode_launch.verify_op if more else decode_launch.decode_op
        torch.library.opcheck(op.registered, (*rows, *more, *rest), test_utils=RULES)
