"""The KDA layer's two ways: op by op, and in one launch where a GPU decodes; and the model under torch.compile."""

import pytest
import torch

from rille.model import kda
from rille.model.context import Context
from rille.model.model import new_model
from rille.model.presets import preset
from rille.ops import conv
from rille.ops import kda as kda_op
from rille.packing import Packing

SMALL = preset("tiny").replace(num_layers=3, mla_layers=(1,))


@pytest.fixture
def decoded(monkeypatch):
    """A GPU's choice. On a CPU `kda_decode` then runs its slow twin. Collects the batches that it got."""
    batches, run = [], kda.kda_decode

    def watched(inputs, *others):
        batches.append(inputs.qkv.shape[0])
        return run(inputs, *others)

    monkeypatch.setattr(kda, "choose_decode", lambda qkv, layer: ("gluon", "as on a GPU"))
    monkeypatch.setattr(kda, "kda_decode", watched)
    return batches


@torch.no_grad()
def test_decode_in_one_launch_is_the_composed_layer(decoded):
    model = new_model(SMALL)
    ids = torch.randint(0, SMALL.vocab_size, (8,), generator=torch.Generator().manual_seed(0))
    memory, again = model.new_memory(2), model.new_memory(2)
    with torch.enable_grad():
        want = model.logits(ids, packing=again.packing([4, 4])).detach()
    for step, lengths in enumerate([[3, 1], [1, 1], [0, 1], [0, 1]]):
        rows = [[0, 1, 2, 4], [3, 5], [6], [7]][step]
        got = model.logits(ids[rows], packing=memory.packing(lengths), memory=memory)
        torch.testing.assert_close(got, want[rows], rtol=1e-4, atol=1e-5)
    assert decoded == [2, 2]  # the two KDA layers, in the one step that brings a token of each sequence


def test_layers_that_learn_or_are_watched_are_composed(decoded):
    model = new_model(SMALL)
    memory = model.new_memory()
    model.logits(torch.tensor([1]), memory=memory)
    model.trace(torch.tensor([2]), memory=memory)
    assert decoded == []


def test_compiled_model():
    """Dynamo traces the model; on a CPU the parts that ask their tensors for sizes break the graph, nothing fails."""
    model, packing = new_model(SMALL), Packing.of([20, 3])
    ids = torch.randint(0, SMALL.vocab_size, (23,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.compile(model, backend="eager")(ids, Context(packing)), model(ids, Context(packing))
    )


@pytest.fixture
def kernels(monkeypatch):
    """What a GPU chooses, in the interpreter; nothing hands out poison, which cannot be traced."""
    pytest.importorskip("triton")
    for op in (kda_op, conv):
        monkeypatch.setattr(op, "choose_backend", lambda *_: ("triton", "as on a GPU"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's test")
@pytest.mark.usefixtures("kernels")
class TestCompiledLayer:
    @pytest.fixture
    def poisoned_memory(self):
        """None here."""

    def test_one_graph_with_kernels(self):
        """Outputs, gradients, and states that move on in a pool: bit for bit those without a compiler."""
        c = SMALL.replace(kda_head_dim=64, kda_heads=2)
        model, memory, again = new_model(c), *(new_model(c).new_memory(2) for _ in range(2))
        layer = model.layers["0"].attn
        x = torch.randn(30, c.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        packing = memory.packing([20, 10])
        eager = layer(x, Context(packing))  # first: a packing derives its indices on the host, outside any graph
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        got = compiled(x, Context(packing))
        assert torch.equal(got, eager)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, eager)))
        with torch.no_grad():
            got, want = compiled(x, Context(packing, memory)), layer(x, Context(packing, again))
        assert torch.equal(got, want)
        assert torch.equal(memory.state(0).pool, again.state(0).pool) and memory.state(0).pool.any()
        assert torch.equal(memory.tail(0).pool, again.tail(0).pool) and memory.tail(0).pool.any()
