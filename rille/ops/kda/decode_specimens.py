"""One launch of each decode and verify kernel as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.kda import decode_gluon, decode_kernels, decode_launch, verify_gluon
from rille.ops.kda.specimens import ring_descriptor

POINTERS = {
    "*bf16": "qkv z b gate y past_qkv past_z tails",
    "*fp32": "conv_weight A_log dt_bias norm_weight states past_u",
    "*i32": "accepted clocks",
    "*i64": "slots",
    "i32": "items tokens past_tokens qkv_row z_row b_row gate_row tail_slot state_slot",
    "fp32": "lower_bound eps",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(name for name in TYPES if name not in ("items", "tokens", "past_tokens", "lower_bound", "eps"))


def specimen(
    name: str, kernel: Any, K: int = 128, V: int = 128, B: int = 32, bounded: bool = True, tokens: int = 8,
    W: int = 4, clocks: bool = False, **more: Any,
) -> Specimen:  # fmt: skip
    constexprs: dict[str, Any] = dict(H=96, K=K, V=V, W=W, BOUNDED=bounded)
    spread = decode_launch.decode_spread(K, V, B)
    if name.startswith("verify_gluon"):
        spread, ahead = decode_launch.verify_spread(K, V), decode_launch.fits_ahead(K, V, tokens, tokens, 2)
        constexprs |= dict(tokens=tokens, past_tokens=tokens, AHEAD=ahead)
        constexprs |= decode_launch.tiles(tokens, tokens) | ({} if clocks else dict(clocks=None))
    if "triton" not in name:
        constexprs |= dict(LANES=spread.lanes)
    if name.startswith("decode_gluon"):
        constexprs |= dict(CHAINED=True)
    types = TYPES | dict(states_desc=ring_descriptor([V, K], "fp32"))
    signature: dict[str, Any] = {arg: types[arg] for arg in kernel.arg_names if arg not in constexprs}
    maxnreg = None if "triton" in name else spread.maxnreg
    limits: dict[str, Any] = dict(divisible=WHOLE, maxnreg=maxnreg, fp_fusion=False)
    return Specimen(f"kda_{name}", kernel, signature, constexprs, spread.num_warps, **(limits | more))


HALF: dict[str, Any] = dict(
    max_spill_bytes=80, reason="weights stay in registers, of which a program of a small state has half as many"
)

SPECIMENS = [
    specimen("decode_gluon", decode_gluon.decode),
    specimen("decode_gluon_small_batch", decode_gluon.decode, B=1),
    specimen("decode_gluon_softplus", decode_gluon.decode, bounded=False),
    specimen("decode_gluon_k64", decode_gluon.decode, K=64, V=64),
    specimen("decode_gluon_v256", decode_gluon.decode, V=256),
    specimen("verify_gluon", verify_gluon.verify),
    specimen("verify_gluon_clocks", verify_gluon.verify, clocks=True),
    specimen("verify_gluon_4", verify_gluon.verify, tokens=4),
    specimen("verify_gluon_1", verify_gluon.verify, tokens=1),
    specimen("verify_gluon_one_tap", verify_gluon.verify, W=1),
    specimen("verify_gluon_softplus", verify_gluon.verify, bounded=False),
    specimen("verify_gluon_k64", verify_gluon.verify, K=64, V=64, **HALF),
    specimen("verify_gluon_v256", verify_gluon.verify, V=256),
    specimen("verify_gluon_16", verify_gluon.verify, tokens=16),
    specimen("verify_gluon_v256_16", verify_gluon.verify, V=256, tokens=16),
    specimen("decode_triton", decode_kernels.decode),
    specimen("verify_triton", decode_kernels.verify),
]
