"""The packed kernels against one query row at a time: values, gradients, the gate, poison around, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.mla import attention, choice, choose_backend, gated_attention, reference, tiles
from rille.packing import Packing

launch = pytest.importorskip("rille.ops.mla.launch", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = DEVICE == "cpu"  # the interpreter multiplies in fp32, the card in 16 bits
H = 2
LENGTHS = [(0, 1, 0), (1, 15, 0, 17, 1, 64, 65), (128, 128), (257, 0, 129, 2)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    kind = dtype or (torch.float32 if EXACT else torch.bfloat16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def draw_all(N: int, K: int, V: int, heads: int = H) -> list[Tensor]:
    return [draw(N, heads, width, seed=seed) for seed, width in enumerate((K, K, V, V))]


def pack(*lengths: int) -> Packing:
    return Packing.of(lengths, device=DEVICE)


def compare(lengths: tuple[int, ...], K: int, V: int, gated: bool) -> None:
    """fp32 sums of up to 257 terms of size 3; on the card 16-bit weights and gradients between products."""
    packing, results = pack(*lengths), []
    for exact in (False, True):
        *qkv, gate = (x.double() if exact else x for x in draw_all(sum(lengths), K, V))
        inputs = [x.requires_grad_() for x in ([*qkv, gate] if gated else qkv)]
        if exact:
            out = reference.attention(*qkv, packing, K**-0.5)
            out = out * gate.sigmoid() if gated else out
        elif gated:
            out = gated_attention(*qkv, gate, packing, K**-0.5, backend="triton")
        else:
            out = attention(*qkv, packing, K**-0.5, backend="triton")
        results.append([out, *torch.autograd.grad((out * torch.cos(out.detach().double())).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        scale = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=(4e-6 if EXACT else 3e-2) * scale)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_values_and_gradients(lengths: tuple[int, ...]) -> None:
    compare(lengths, 24, 16, gated=False)


WIDTHS = [(192, 128, True), (96, 64, False), (128, 128, True), (64, 64, False), (40, 24, True), (8, 8, True)]
WIDTHS += [(16, 48, False)]


@pytest.mark.parametrize(("K", "V", "gated"), WIDTHS)
def test_widths(K: int, V: int, gated: bool) -> None:
    compare((3, 0, 70), K, V, gated)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    inputs = [x.requires_grad_() for x in draw_all(0, 24, 16)]
    out = gated_attention(*inputs, pack(*lengths), 0.3, backend="triton")
    assert out.shape == (0, H, 16) and out.dtype == inputs[0].dtype
    out.sum().backward()
    assert inputs[0].grad is not None and inputs[0].grad.shape == inputs[0].shape


def test_other_sequences_do_not_reach_a_row() -> None:
    """Both neighbours hold NaN in everything, the gradient of their output too."""
    lengths, inside = (70, 75, 130), slice(70, 145)
    results = []
    for poisoned in (False, True):
        inputs = draw_all(275, 24, 16)
        for x in inputs if poisoned else ():
            x[:70], x[145:] = torch.nan, torch.nan
        for x in inputs:
            x.requires_grad_()
        out = gated_attention(*inputs, pack(*lengths), 0.3, backend="triton")
        weight = draw(275, H, 16, seed=9)
        if poisoned:
            weight[:70], weight[145:] = torch.nan, torch.nan
        grads = torch.autograd.grad(out, inputs, weight)
        results.append([x[inside] for x in (out, *grads)])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want) and torch.isfinite(got).all()


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    q, k, v, _ = draw_all(310, 24, 16)
    together = attention(q, k, v, pack(20, 150, 140), 0.3, backend="triton")
    alone = attention(q[20:170], k[20:170], v[20:170], pack(150), 0.3, backend="triton")
    assert torch.equal(together[20:170], alone)


def test_views_are_read_where_they_lie() -> None:
    """Keys and values as the layer hands them over: slices of one projection; queries with heads apart."""
    both, packing = draw(40, H, 24 + 16), pack(33, 7)
    k, v = both.split([24, 16], -1)
    q = draw(H, 40, 24, seed=3).transpose(0, 1)
    assert launch.fetchable(v) is v and launch.fetchable(q) is q
    got = attention(q, k, v, packing, 0.3, backend="triton")
    whole = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(got, attention(*whole, packing, 0.3, backend="triton"))
    one = v[:, :1].expand(-1, H, -1)
    assert launch.fetchable(one).is_contiguous()


def test_gradient_of_a_view() -> None:
    q, k, v, _ = (x.requires_grad_() for x in draw_all(20, 24, 16))
    out = attention(q, k, v, pack(20), 0.3, backend="triton")
    weight = draw(H, 20, 16, seed=5, dtype=torch.float32)
    apart, dense = weight.transpose(0, 1), weight.transpose(0, 1).contiguous()
    grads = [torch.autograd.grad(out, [q, k, v], x, retain_graph=True) for x in (apart, dense)]
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_result_types() -> None:
    """fp32 by default whatever the operands; 16 bits are the same numbers, rounded."""
    q, k, v, _ = (x.bfloat16() for x in draw_all(50, 24, 16))
    wide = attention(q, k, v, pack(50), 0.3, backend="triton")
    narrow = attention(q, k, v, pack(50), 0.3, dtype=torch.bfloat16, backend="triton")
    exact = reference.attention(q.double(), k.double(), v.double(), pack(50), 0.3)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    assert ((narrow.float() - wide).abs() <= 2**-7 * wide.abs()).all()  # the interpreter truncates
    # The weights are rounded to 8 bits, their sum is not: at most 2^-8 of a mean of values up to 4 (2^-7 truncated).
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=2**-7 * 4)


def test_a_tile_of_each_row_once_and_the_longest_first() -> None:
    packing = Packing.of([130, 0, 1, 64, 65])
    for table, work in ((tiles.query_tiles(packing, 64), 1), (tiles.key_tiles(packing, 64), 2)):
        rows = [list(range(s + first, s + min(first + 64, length))) for s, first, length, _ in table.tolist()]
        assert sorted(sum(rows, [])) == list(range(260))
        amounts = [row[1] if work == 1 else row[2] - row[1] for row in table.tolist()]
        assert amounts == sorted(amounts, reverse=True)
    assert tiles.query_tiles(packing, 64) is tiles.query_tiles(packing, 64)


@pytest.mark.parametrize(
    ("width", "cut"), [(192, (128, 64)), (96, (64, 32)), (128, (128, 0)), (24, (32, 0)), (8, (16, 0)), (144, (128, 16))]
)
def test_parts_of_a_width(width: int, cut: tuple[int, int]) -> None:
    assert tiles.parts(width) == cut


def test_heads_in_groups() -> None:
    """More heads than the L2 cache holds at a time: groups of 3, 3 and 1."""
    compare_heads = draw_all(140, 24, 16, heads=7)[:3]
    want = attention(*compare_heads, pack(140), 0.3, backend="triton")
    limit, tiles.L2_SHARE = tiles.L2_SHARE, 3 * 140 * 40 * compare_heads[0].element_size()
    try:
        assert tiles.heads_together(7, 140, 40 * compare_heads[0].element_size()) == 3
        assert torch.equal(attention(*compare_heads, pack(140), 0.3, backend="triton"), want)
    finally:
        tiles.L2_SHARE = limit


def test_ops_are_registered_whole() -> None:
    q, k, v, gate = draw_all(10, 24, 16)
    packing = pack(7, 3)
    tables = [tiles.query_tiles(packing, 128), tiles.query_tiles(packing, 128), tiles.key_tiles(packing, 128)]
    checks = ("test_schema", "test_faketensor")
    for g in (None, gate):
        arguments = (q, k, v, g, *tables, 7, 0.3, torch.float32, True)
        torch.library.opcheck(launch.forward_op.registered, arguments, test_utils=checks)
        out, kept, lse = launch.forward_op(*arguments)
        arguments = (out, q, k, v, g, out if g is None else kept, lse, *tables[1:], 7, 0.3)
        torch.library.opcheck(launch.backward_op.registered, arguments, test_utils=checks)


def test_compiled_models_see_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the poisoned torch.empty, which the compiler would take for the real one from then on
    inputs = [x.requires_grad_() for x in draw_all(8, 24, 16)]
    packing = pack(5, 3)

    def form(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return gated_attention(q, k, v, gate, packing, 0.3, backend="triton")

    want = form(*inputs)
    got = torch.compile(form, backend="aot_eager", fullgraph=True)(*inputs)
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(x.float().sum(), inputs) for x in (got, want)), strict=True):
        assert torch.equal(a, b)


def test_choice_and_refusal() -> None:
    q, k, v, _ = draw_all(6, 24, 16)
    packing = pack(6)
    name, reason = choose_backend(q, v, packing, 0.3, torch.float32)
    assert reason and name == ("triton" if DEVICE == "cuda" else "torch")
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        attention(q, k, v, packing, 0.3, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        attention(q.double(), k.double(), v.double(), packing, 0.3, backend="triton")
    with pytest.raises(ValueError, match="not 20 and 16"):
        attention(q[..., :20], k[..., :20], v, packing, 0.3, backend="triton")
    with pytest.raises(ValueError, match="positive scale"):
        attention(q, k, v, packing, -0.3, backend="triton")
    with pytest.raises(ValueError, match="gate"):
        gated_attention(q, k, v, v[:, :1], packing, 0.3)
    if DEVICE == "cpu":
        for name in ("flash", "cudnn"):
            with pytest.raises(ValueError, match=f"'{name}' cannot run: the tensors are on cpu"):
                attention(q, k, v, packing, 0.3, backend=name)


def test_where_the_library_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the measured table: 16 bits with gradients at 192 / 128, in one length or with many heads."""
    monkeypatch.setattr(choice.library, "unsupported", lambda q: "")

    def chosen(*lengths: int, heads: int = 2, K: int = 192, learns: bool = True) -> bool:
        q = torch.empty(sum(lengths), heads, K, requires_grad=learns)
        return bool(choice.library_is_faster(q, torch.empty(sum(lengths), heads, 128), Packing.of(lengths)))

    assert chosen(5, 5) and chosen(5, 3, heads=96)
    assert not (chosen(5, 3) or chosen(5, 5, K=128) or chosen(5, 5, learns=False))


def test_a_gate_reads_what_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(q: Tensor, v: Tensor, packing: Packing, scale: float, dtype: torch.dtype) -> tuple[str, str]:
        asked.append(dtype)
        return "torch", "the tensors are on cpu"

    monkeypatch.setattr(choice, "choose_backend", choose)
    q, k, v, gate = (torch.randn(6, 2, width).to(torch.bfloat16) for width in (24, 24, 16, 16))
    assert gated_attention(q, k, v, gate, pack(6), 0.3).dtype == torch.bfloat16
    attention(q, k, v, pack(6), 0.3, dtype=torch.bfloat16)
    assert asked == [torch.float32, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_library_forms(backend: str) -> None:
    *qkv, _ = draw_all(140, 192, 128)
    got = attention(*qkv, pack(100, 0, 40), 0.1, dtype=torch.bfloat16, backend=backend)
    want = attention(*qkv, pack(100, 0, 40), 0.1, backend="reference")
    torch.testing.assert_close(got.float(), want, rtol=0, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(192, 128), (128, 128), (96, 64)])
def test_gluon_agrees_with_its_twin(K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside sequences of NaN; the same weights rounded at other maxima."""
    results = []
    for rings in (False, True):
        monkeypatch.setattr(launch, "RINGS", rings)
        monkeypatch.setattr(launch, "KEY_RINGS", rings)
        inputs = draw_all(1000, K, V)
        for x in inputs:
            x[700:] = torch.nan
            x.requires_grad_()
        out = gated_attention(*inputs, pack(300, 1, 0, 399, 300), K**-0.5, backend="triton")
        grads = torch.autograd.grad(out[:700].float().square().sum(), inputs)
        results.append([x[:700] for x in (out, *grads)])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=0, atol=2e-2 * want.abs().max().item())


def test_gated_forms_agree() -> None:
    *qkv, gate = draw_all(30, 24, 16)
    forms = [gated_attention(*qkv, gate, pack(30), 0.3, backend=name).float() for name in ("torch", "reference")]
    torch.testing.assert_close(forms[0], forms[1], rtol=0, atol=1e-6 if EXACT else 2**-8)
