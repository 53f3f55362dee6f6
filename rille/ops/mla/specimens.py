"""One launch of each kernel of MLA attention as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.mla import (
    backward_gluon,
    backward_kernels,
    decode_kernels,
    decode_launch,
    decode_parts,
    decode_stream,
    forward_gluon,
    forward_kernels,
)
from rille.ops.mla.tiles import FORWARD, KEYS, QUERIES, Blocks, cover, parts

POINTERS = {
    "*bf16": "gate_ptr y_ptr dq_ptr dk_ptr dv_ptr do_ptr dgate_ptr rounded_ptr pool_ptr",
    "*fp32": "o_ptr lse_ptr delta_ptr scale_ptr partial_ptr",
    "*i64": "table_ptr",
    "*i32": "tiles_ptr starts_ptr history_ptr members_ptr",
    "i64": "page_stride",
    "i32": "N H together gate_row gate_head q_head k_head v_head do_head do_row scale_page scale_row max_pages "
    "page_step tiles splits most_rows members",
    "fp32": "scale scale2",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
DIVISIBLE = ("gate_row", "gate_head", "do_row", "do_head", "q_head", "k_head", "v_head", "page_stride")
TAIL_SPILLS = "outside the loop over whole blocks: the block that crosses a sequence's end, at most one a program"


def block(rows: int, width: int, kind: str = "bf16") -> str:
    return f"tensordesc<{kind}[1,{rows},{width}]>"


def specimen(name: str, kernel: Any, constexprs: dict[str, Any], blocks: dict[str, str], **rest: Any) -> Specimen:
    signature: dict[str, Any] = blocks | {n: TYPES[n] for n in kernel.arg_names if n in TYPES and n not in constexprs}
    divisible = tuple(n for n in signature if n in DIVISIBLE or n.endswith("_ptr"))
    constexprs |= {n: None for n in kernel.arg_names if n.endswith("_desc") and n not in blocks}
    return Specimen(f"mla_{name}", kernel, signature, constexprs, divisible=divisible, **rest)


def packed(kind: str, K: int, V: int, b: Blocks, gated: bool = False, **rest: Any) -> Specimen:
    """kind: forward, query or key."""
    kernel = dict(
        forward=forward_kernels.forward_kernel, query=backward_kernels.query_kernel, key=backward_kernels.key_kernel
    )[kind]
    rows, columns = (b.other, b.own) if kind == "key" else (b.own, b.other)
    KA, KB = parts(K)
    VB = cover(V)
    blocks = dict(q_a_desc=block(rows, KA), k_a_desc=block(columns, KA), v_desc=block(columns, VB))
    if KB:
        blocks |= dict(q_b_desc=block(rows, KB), k_b_desc=block(columns, KB))
    if kind != "forward":
        blocks["do_desc"] = block(rows, VB)
    constants: dict[str, Any] = dict(K=K, V=V, ROWS=rows, COLUMNS=columns, KA=KA, KB=KB, VB=VB, UPCAST=False)
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    if not gated and kind == "forward":
        constants |= dict(gate_ptr=None, y_ptr=None)
    name = f"{kind}{'_gated' if gated else ''}_k{K}_v{V}"
    return specimen(name, kernel, constants, blocks, num_warps=b.warps, num_stages=b.stages, want_wgmma=True, **rest)


def rows(count: int, width: int) -> str:
    """A block for Gluon."""
    from triton.experimental.gluon import language as gl

    layout: Any = gl.NVMMASharedLayout.get_default_for([count, width], gl.bfloat16)
    return f"tensordesc<bf16[{count}, {width}],{layout!r}>"


def rings(K: int, V: int, gated: bool = False) -> Specimen:
    KA, KB = parts(K)
    blocks = dict(q_a_desc=rows(64, KA), k_a_desc=rows(128, KA), v_desc=rows(128, V))
    blocks |= dict(q_b_desc=rows(64, KB), k_b_desc=rows(128, KB)) if KB else {}
    constants: dict[str, Any] = dict(V=V, COLUMNS=128, KA=KA, KB=KB, STAGES=2, num_warps=4)
    constants |= {} if gated else dict(gate_ptr=None, y_ptr=None)
    name = f"rings{'_gated' if gated else ''}_k{K}_v{V}"
    return specimen(name, forward_gluon.forward_rings_kernel, constants, blocks, num_warps=4, want_wgmma=True)


def key_rings(K: int, V: int) -> Specimen:
    KA, KB = parts(K)
    blocks = dict(k_a_desc=rows(64, KA), v_desc=rows(64, V), q_a_desc=rows(64, KA), do_desc=rows(64, V))
    blocks |= dict(k_b_desc=rows(64, KB), q_b_desc=rows(64, KB)) if KB else {}
    constants: dict[str, Any] = dict(V=V, KA=KA, KB=KB, STAGES=3, num_warps=4)
    return specimen(
        f"key_rings_k{K}_v{V}", backward_gluon.key_rings_kernel, constants, blocks, num_warps=4, want_wgmma=True,
        max_spill_bytes=256, reason="dk and dv are 160 of a thread's registers; to be weighed against blocks of 32",
    )  # fmt: skip


def prepare(gated: bool) -> Specimen:
    constants: dict[str, Any] = dict(V=128, VB=128, ROWS=32)
    constants |= {} if gated else dict(gate_ptr=None, dgate_ptr=None)
    return specimen(f"prepare{'_gated' if gated else ''}", backward_kernels.prepare_kernel, constants, {}, num_warps=4)


def latents(H: int, tokens: int, V: int = 512, R: int = 576, page: int = 64, scaled: bool = False) -> Specimen:
    p = decode_launch.plan(H, tokens, 32768, scaled)
    A, B, whole = cover(V), cover(R - V), page % decode_launch.BLOCK == 0
    kind = "fp8e4nv" if scaled else "bf16"
    blocks = dict(q_a_desc=block(p.ROWS, A), q_b_desc=block(p.ROWS, B))
    if whole:
        blocks |= dict(c_a_desc=block(decode_launch.BLOCK, A, kind), c_b_desc=block(decode_launch.BLOCK, B, kind))
    constants: dict[str, Any] = dict(
        VALUE=V, R=R, A=A, B=B, PAGE=page, ROWS=p.ROWS, BLOCK=decode_launch.BLOCK, TAIL=decode_launch.TAIL,
        SPLIT=p.SPLIT, WHOLE=whole, FEW=p.FEW, UPCAST=False,
    )  # fmt: skip
    if not scaled:
        constants["scale_ptr"] = None
    name = f"latents_h{H}x{tokens}_v{V}_page{page}{'_e4m3' if scaled else ''}"
    found = specimen(
        name, decode_kernels.latent_kernel, constants, blocks, num_warps=p.warps, num_stages=p.stages, want_wgmma=True,
        max_spill_bytes=512, reason="outside the loop over whole blocks: the last rows of a sequence, 16 at a time",
    )  # fmt: skip
    return found if not scaled else _with_8_bit_rows(found)


def latent_parts(V: int, R: int) -> Specimen:
    blocks = dict(q_desc=rows(64, V // 4), q_b_desc=rows(64, R - V), c_desc=rows(64, V // 4), c_b_desc=rows(64, R - V))
    constants: dict[str, Any] = dict(VALUE=V, PAGE=64, SPLIT=4096, num_warps=4)
    kernel = decode_parts.latent_parts_kernel
    return specimen(f"latent_parts_v{V}", kernel, constants, blocks, num_warps=4, want_wgmma=True)


def latent_stream(Q: int, V: int, R: int) -> Specimen:
    blocks = dict(q_desc=rows(Q, V), q_b_desc=rows(Q, R - V), c_desc=rows(64, V), c_b_desc=rows(64, R - V))
    constants: dict[str, Any] = dict(VALUE=V, PAGE=64, SPLIT=2048, Q=Q, CHAINED=True, num_warps=4)
    kernel = decode_stream.latent_stream_kernel
    return specimen(
        f"latent_stream_q{Q}_v{V}", kernel, constants, blocks, num_warps=4, want_wgmma=True,
        max_spill_bytes=192, reason="addresses read again in the loop: at Q = 32 sums are 128 registers",
    )  # fmt: skip


def _with_8_bit_rows(found: Specimen) -> Specimen:
    from dataclasses import replace

    return replace(found, signature={**found.signature, "pool_ptr": "*fp8e4nv"})


def specimens() -> list[Specimen]:
    merge = dict(VALUE=512, A=512, SPLIT=2048)
    return [
        *(packed("forward", K, V, FORWARD) for K, V in ((192, 128), (128, 128), (96, 64), (64, 64), (24, 16))),
        packed("forward", 192, 128, FORWARD, gated=True),
        *(packed("query", K, V, QUERIES) for K, V in ((192, 128), (96, 64))),
        *(packed("key", K, V, KEYS, max_spill_bytes=192, reason=TAIL_SPILLS) for K, V in ((192, 128), (96, 64))),
        *(rings(K, V) for K, V in ((192, 128), (128, 128), (96, 64))),
        rings(192, 128, gated=True),
        *(key_rings(K, V) for K, V in ((192, 128), (96, 64))),
        *map(prepare, (False, True)),
        *(latents(H, tokens) for H, tokens in ((8, 1), (16, 1), (24, 1), (96, 1), (24, 4))),
        latents(16, 1, V=256, R=320),
        latents(96, 1, page=48),
        latents(16, 1, scaled=True),
        latent_parts(512, 576),
        latent_parts(256, 320),
        *(latent_stream(Q, 512, 576) for Q in (16, 32)),
        latent_stream(16, 256, 320),
        specimen("merge", decode_kernels.merge_kernel, merge, {}, num_warps=4),
    ]
