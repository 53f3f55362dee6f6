"""Properties that hold for any K3-type model: packing, memory, gradients, seams, switches."""

import pytest
import torch

from rille.model.attn_res import Depth
from rille.model.balance import Counts
from rille.model.context import Context, Routes
from rille.model.model import K3, new_model
from rille.model.presets import preset
from rille.packing import Packing

SMALL = preset("tiny").replace(
    vocab_size=97, hidden_size=64, num_layers=5, mla_layers=(2, 4), num_experts=8, active_experts=2, block_layers=2
)
SWITCHES = {
    "k3": {},
    "full attention residuals": {"residual": "attn_res_full"},
    "standard residual": {"residual": "standard"},
    "softplus decay": {"decay_lower_bound": None},
    "another bound": {"decay_lower_bound": -2.5},
    "a bound beyond blocks": {"decay_lower_bound": -8.0},
    "low-rank gate": {"kda_gate_rank": 8},
    "swiglu": {"activation": "swiglu"},
    "other caps": {"gate_cap": 1.5, "up_cap": 3.0},
    "full-width experts": {"latent_width": None, "latent_norm": False},
    "no latent norm": {"latent_norm": False},
    "no shared experts": {"shared_experts": 0},
    "no output gate": {"mla_gate": False},
    "plain queries": {"q_rank": None},
    "tied embeddings": {"tied_embeddings": True},
    "two dense layers": {"dense_layers": 2},
    "all dense": {"dense_layers": 5},
    "only KDA": {"mla_layers": ()},
    "only MLA": {"mla_layers": (0, 1, 2, 3, 4)},
    "wide convolution": {"conv_width": 7},
    "no convolution": {"conv_width": 1},
    "no shared key": {"shared_key_dim": 0},
    "blocks of one layer": {"block_layers": 1},
    "one long block": {"block_layers": 99},
    "scaled, not renormalised": {"routed_scale": 2.446, "renormalise": False},
    "other head counts": {"kda_heads": 5, "kda_head_dim": 16, "mla_heads": 2, "value_dim": 24},
}


def make(**changes):
    """A model whose queries, biases and decays are not at their initial zeros."""
    model = new_model(SMALL.replace(**changes), dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("query", "router_bias", "A_log"):
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        elif parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def ids(count, seed=0):
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES.keys())
def test_packed_split_and_single_agree_for_every_switch(changes):
    model, lengths = make(**changes), [70, 0, 1, 130]
    documents = [ids(n, seed) for seed, n in enumerate(lengths)]
    packed = model.logits(torch.cat(documents), packing=Packing.of(lengths)).split(lengths)
    memory, parts = model.new_memory(4), []
    for cuts in ([3, 0, 0, 128], [66, 0, 1, 1], [1, 0, 0, 1]):
        done = memory.lengths.copy()
        batch = torch.cat([d[s : s + n] for d, s, n in zip(documents, done, cuts, strict=True)])
        parts.append(model.logits(batch, packing=memory.packing(cuts), memory=memory).split(cuts))
    for sequence, document in enumerate(documents):
        alone = model.logits(document)
        split = torch.cat([part[sequence] for part in parts])
        assert torch.allclose(packed[sequence], alone, atol=1e-9)
        assert torch.allclose(split, alone, atol=1e-9)


def test_gradients_reach_everything_but_the_router_bias():
    model = make()
    model.logits(ids(140), packing=Packing.of([100, 40])).square().mean().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("router_bias") or name.startswith("layers.0.attn_mix"):  # the first site has one source
            assert parameter.grad is None
        elif name.endswith("A_log"):
            assert parameter.grad[:3].abs().min() > 0 and not parameter.grad[3:].any()
        else:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "name", ["layers.0.attn.decay_up", "layers.1.ffn.router", "layers.3.attn_mix.query", "layers.4.attn.kv_up"]
)
def test_gradients_against_finite_differences(name):
    model, tokens = make(), ids(80)
    parameter = model.get_parameter(name)
    direction = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model.logits(tokens).square().mean().backward()
    assert parameter.grad is not None
    slope, step = float((parameter.grad * direction).sum()), 1e-6
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            parameter.add_(sign * step * direction)
            ends.append(float(model.logits(tokens).square().mean()))
            parameter.sub_(sign * step * direction)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-9)


@torch.no_grad()
def test_layer_ranges_chain_to_the_whole():
    whole, tokens = make(), ids(90)
    ctx = Context(Packing.of([90]))
    stages = [K3(whole.config, dtype=torch.float64, device="cpu", layers=r) for r in (range(0, 2), range(2, 5))]
    for stage in stages:
        stage.load_state_dict(whole.state_dict(), strict=False)
    depth = stages[0].run(Depth(torch.nn.functional.embedding(tokens, whole.embed)), ctx)
    hidden = stages[1].finish(stages[1].run(depth, ctx), ctx)
    assert torch.equal(hidden, whole.hidden(tokens))


@torch.no_grad()
def test_routes_record_and_replay():
    model, tokens = make(), ids(60)
    recorded = Routes()
    first = model(tokens, Context(Packing.of([60]), routes=recorded))
    for bias in model.router_biases().values():
        bias.add_(torch.linspace(-1, 1, 8))
    assert not torch.allclose(model(tokens, Context(Packing.of([60]))), first)
    assert torch.equal(model(tokens, Context(Packing.of([60]), routes=Routes(recorded.chosen, replay=True))), first)
    with pytest.raises(ValueError, match="replays ids"):
        model(tokens[:50], Context(Packing.of([50]), routes=Routes(recorded.chosen, replay=True)))


def test_counts_hold_every_token_once():
    model, counts = make(), Counts()
    for n in (60, 33):
        model(ids(n), Context(Packing.of([n]), counts=counts))
    assert sorted(counts.load) == [1, 2, 3, 4]
    assert all(int(load.sum()) == 2 * 93 for load in counts.load.values())
    assert all(h.sum(1).tolist() == [93] * 8 for h in counts.histogram.values())


@torch.no_grad()
def test_the_tap_can_replace_a_tensor():
    model, tokens = make(), ids(20)
    ctx = Context(Packing.of([20]), tap=lambda name, t: torch.zeros_like(t) if name == "layers.2.attn_out" else t)
    assert not torch.allclose(model(tokens, ctx), model.hidden(tokens))


@torch.no_grad()
def test_causality():
    model, tokens = make(), ids(150)
    changed = tokens.clone()
    changed[100:] = ids(50, seed=9)
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:64], after[:64]) or torch.allclose(before[:100], after[:100], atol=1e-10)
    assert not torch.allclose(before[100:], after[100:])


@torch.no_grad()
def test_rows_and_single_tokens():
    model, tokens = make(), ids(30)
    rows = torch.tensor([29, 0, 7])
    assert torch.allclose(model.logits(tokens, rows=rows), model.logits(tokens)[rows])
    assert model.logits(tokens[:1]).shape == (1, 97)
    assert model.logits(tokens[:0]).shape == (0, 97)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.tensor([3, 97]), "97"),
        (torch.tensor([-1]), "-1"),
        (torch.zeros(2, 3, dtype=torch.int64), "shape"),
        (torch.zeros(3), "int64"),
    ],
)
def test_wrong_tokens_are_refused(tokens, words):
    with pytest.raises(ValueError, match=words):
        make().logits(tokens)


def test_wrong_packings_and_memories_are_refused():
    model = make()
    memory = model.new_memory(2)
    with pytest.raises(ValueError, match="describes 4"):
        model.logits(ids(5), packing=Packing.of([4]))
    with pytest.raises(ValueError, match="holds 2 sequences"):
        memory.packing([1])
    with pytest.raises(ValueError, match="continues after"):
        model.logits(ids(5), packing=Packing.of([2, 3], [1, 0]), memory=memory)
    with pytest.raises(ValueError, match="no memory"):
        model.logits(ids(5), packing=Packing.of([5], [3]))
    with pytest.raises(ValueError, match="layers"):
        K3(SMALL, dtype=torch.float32, device="meta", layers=range(3, 9))
