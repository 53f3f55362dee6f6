"""Multi-token prediction: loss and draft against the equations, packing, memory, checkpoints."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from rille.model.balance import Counts
from rille.model.checkpoint import load_model, save_model
from rille.model.context import Context
from rille.model.model import new_model
from rille.model.mtp import add_mtp, mtp_loss
from rille.model.names import count_parameters
from rille.model.presets import preset
from rille.packing import Packing

SMALL = preset("tiny").replace(
    vocab_size=61, hidden_size=32, num_layers=3, mla_layers=(1,), num_experts=6, active_experts=2, mtp_layers=1
)
D = SMALL.hidden_size


def make(dtype=torch.float64, **changes):
    model = new_model(SMALL.replace(**changes), dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("router_bias", "norm", "gain", "query")):
            parameter.data.add_(0.2 * noise)
        elif parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def ids(count, seed=0):
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed))


def norm(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def literal(model, hidden, following):
    """States and logits of the MTP layers for one whole sequence; following[k-1][i] is token t_{i+k}, where known."""
    states, logits, state = [], [], hidden
    for layer, tokens in zip(model.mtp, following, strict=False):
        embedded = model.embed[tokens].clone()
        embedded[:1] = 0
        state = state[: len(tokens)]
        x = torch.cat([norm(embedded, layer.embed_norm), norm(state, layer.hidden_norm)], dim=-1) @ layer.proj.T
        ctx = Context(Packing.of([len(tokens)]))
        x = x + layer.block.attn(norm(x, layer.block.attn_norm), ctx)
        state = x + layer.block.ffn(norm(x, layer.block.ffn_norm), ctx)
        states.append(state)
        logits.append(norm(state, layer.norm) @ model.head_weight.T)
    return states, logits


def distance(a, b):
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_loss_is_what_the_equations_say(layers):
    model, tokens = make(mtp_layers=layers), ids(20)
    targets = torch.cat([tokens[1:], torch.tensor([7])])  # the token after the window is known to the loader
    targets[5] = targets[11] = -100
    packing = Packing.of([20])
    hidden = model(tokens, Context(packing))
    results = mtp_loss(model, hidden, tokens, targets, packing)
    _, logits = literal(model, hidden, [tokens[k:] for k in range(1, layers + 1)])
    assert len(results) == layers
    for k, (result, ours) in enumerate(zip(results, logits, strict=True), 1):
        expected = cross_entropy(ours, targets[k:], reduction="sum")
        assert len(ours) == 20 - k and int(result.count) == 20 - k - 2
        assert distance(result.loss_sum, expected) <= 1e-9


def test_never_across_sequences():
    model, lengths = make(mtp_layers=2), [7, 0, 1, 2, 12, 3]
    tokens, targets = ids(25), ids(25, seed=1)
    packing = Packing.of(lengths)
    packed = mtp_loss(model, model(tokens, Context(packing)), tokens, targets, packing)
    alone = []
    for t, y in zip(tokens.split(lengths), targets.split(lengths), strict=True):
        one = Packing.of([len(t)])
        alone.append(mtp_loss(model, model(t, Context(one)), t, y, one))
    for k in range(2):
        assert int(packed[k].count) == sum(max(n - k - 1, 0) for n in lengths)
        assert distance(packed[k].loss_sum, sum(results[k].loss_sum for results in alone)) <= 1e-9
        assert distance(packed[k].log_probs, torch.cat([results[k].log_probs for results in alone])) <= 1e-9


def test_gradients_reach_trunk_and_layer_and_loads_are_counted():
    model, tokens, packing, counts = make(), ids(24), Packing.of([14, 10]), Counts()
    hidden = model(tokens, Context(packing, counts=counts))
    mtp_loss(model, hidden, tokens, ids(24, 1), packing, counts)[0].loss_sum.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith("layers.0.attn_mix"):  # a single source: nothing to weigh
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert set(model.router_biases()) == set(counts.load) == {1, 2, 3}
    assert int(counts.load[3].sum()) == 2 * (24 - 2)  # active experts x rows
    model.zero_grad()
    mtp_loss(model, hidden.detach(), tokens, ids(24, 1), packing)[0].loss_sum.backward()
    assert model.layers["0"].attn.q_proj.grad is None and model.mtp[0].proj.grad is not None


def test_what_the_loss_refuses():
    model = new_model(SMALL.replace(mtp_layers=0))
    assert model.mtp is None
    with pytest.raises(ValueError, match="no multi-token-prediction layer"):
        mtp_loss(model, torch.zeros(4, D), ids(4), ids(4), Packing.of([4]))
    with pytest.raises(ValueError, match=r"continue after \[2\]"):
        mtp_loss(make(), torch.zeros(4, D).double(), ids(4), ids(4), Packing.of([4], [2]))


# --- draft ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_draft_is_what_the_equations_say():
    """The first guess follows the last row; the next ones go on from the layer's own state and guess."""
    model, tokens = make(), ids(15)
    hidden, following = model.hidden(tokens[:14]), tokens[1:]
    guesses, probabilities = model.draft(hidden, following, count=3)
    assert guesses.shape == (1, 3) and probabilities.shape == (1, 3, 61) and probabilities.dtype == torch.float32
    state, known = hidden, following
    for j in range(3):
        states, logits = literal(model, state, [known])
        expected = logits[0][-1].softmax(-1).float()
        assert distance(probabilities[0, j], expected) <= 1e-6
        assert int(guesses[0, j]) == int(expected.argmax())
        state, known = torch.cat([state, states[0][-1:]]), torch.cat([known, guesses[0, j : j + 1]])


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1, 13], [5, 1, 1, 7], [14]])
def test_drafts_in_pieces_are_the_same(cuts):
    """Guesses leave nothing in the memory; a memory is advanced by true rows only."""
    model, tokens = make(), ids(15)
    hidden, following = model.hidden(tokens[:14]), tokens[1:]
    memory = model.new_draft_memory()
    for h, t in zip(hidden.split(cuts), following.split(cuts), strict=True):
        guesses, probabilities = model.draft(h, t, memory, count=4)
    whole = model.draft(hidden, following, count=4)
    assert memory.lengths == [14]
    assert torch.equal(guesses, whole[0]) and distance(probabilities, whole[1]) <= 1e-6


@torch.no_grad()
def test_several_sequences_draft_together():
    model, memory = make(), make().new_draft_memory(3)
    tokens = [ids(12, seed) for seed in range(3)]
    hidden = [model.hidden(t[:11]) for t in tokens]
    done = [0, 0, 0]
    for lengths in ([3, 1, 5], [1, 1, 1], [7, 2, 4]):
        spans = [slice(d, d + n) for d, n in zip(done, lengths, strict=True)]
        h = torch.cat([x[span] for x, span in zip(hidden, spans, strict=True)])
        t = torch.cat([x[1:][span] for x, span in zip(tokens, spans, strict=True)])
        guesses, probabilities = model.draft(h, t, memory, packing=memory.packing(lengths), count=2)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    assert memory.lengths == done == [11, 4, 10]
    for s, n in enumerate(done):
        alone, p = model.draft(hidden[s][:n], tokens[s][1 : n + 1], count=2)
        assert torch.equal(guesses[s], alone[0]) and distance(probabilities[s], p[0]) <= 1e-6


@torch.no_grad()
def test_sampled_guesses_follow_the_distribution():
    model, tokens = make(), ids(9)
    hidden = model.hidden(tokens[:8])
    generator = torch.Generator().manual_seed(0)
    drawn = [model.draft(hidden, tokens[1:], temperature=0.7, generator=generator) for _ in range(400)]
    probabilities = drawn[0][1][0, 0]
    greedy = model.draft(hidden, tokens[1:])[1][0, 0]
    assert distance(probabilities, (greedy.log() / 0.7).softmax(-1)) <= 1e-5
    seen = torch.bincount(torch.cat([guess.flatten() for guess, _ in drawn]), minlength=61) / 400
    spread = (probabilities * (1 - probabilities) / 400).sqrt()
    assert ((seen - probabilities).abs() <= 5 * spread + 1e-3).all()


def test_what_a_draft_refuses():
    model, h = make(), torch.zeros(4, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="rows"):
        model.draft(h, ids(3))
    with pytest.raises(ValueError, match=r"rows \[4, 0\]"):
        model.draft(h, ids(4), packing=Packing.of([4, 0]))
    with pytest.raises(ValueError, match="count is 0"):
        model.draft(h, ids(4), count=0)
    with pytest.raises(ValueError, match="count is float 1.5"):
        model.draft(h, ids(4), count=1.5)
    with pytest.raises(ValueError, match="made for another model"):
        model.draft(h, ids(4), model.new_memory())
    with pytest.raises(ValueError, match="temperature is nan"):
        model.draft(h, ids(4), temperature=float("nan"))
    with pytest.raises(ValueError, match="hidden is torch.float32"):
        model.draft(h.float(), ids(4))
    with pytest.raises(ValueError, match="token ids run from"):
        model.draft(h, ids(4) + 10**6)
    with pytest.raises(ValueError, match="the model has 2"):
        make(mtp_layers=2).draft(h, ids(4))
    with pytest.raises(ValueError, match="no multi-token-prediction layer"):
        new_model(SMALL.replace(mtp_layers=0)).new_draft_memory()


def test_it_learns_to_draft():
    """A counting sequence; the trunk stays random, the MTP layer learns what comes two tokens on."""
    model = new_model(SMALL.replace(mtp_layers=0, num_layers=2, mla_layers=(1,)), seed=3)
    add_mtp(model, seed=4)
    assert model.config.mtp_layers == 1
    tokens = torch.cat([(torch.arange(20) * 3 + start) % 61 for start in range(0, 61, 4)])
    packing = Packing.of([20] * 16)
    with torch.no_grad():
        hidden = model(tokens, Context(packing))
    optimizer = torch.optim.Adam(model.mtp.parameters(), lr=1e-2)
    model.embed.requires_grad_(False)
    model.head.data.mul_(10)
    for _ in range(60):
        loss = mtp_loss(model, hidden, tokens, (tokens + 3) % 61, packing)[0]
        optimizer.zero_grad()
        (loss.loss_sum / loss.count).backward()
        optimizer.step()
    fresh = (torch.arange(9) * 3 + 1) % 61
    with torch.no_grad():
        guesses, _ = model.draft(model.hidden(fresh[:8]), fresh[1:])
    assert int(guesses) == (9 * 3 + 1) % 61


# --- checkpoints ------------------------------------------------------------------------------------------------------


def tensors(directory):
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_there_and_back(tied, tmp_path):
    model = make(torch.float32, mtp_layers=2, tied_embeddings=tied)
    save_model(model, tmp_path, dtype=torch.float32)
    stored, prefix = tensors(tmp_path), "language_model.model.layers.4."
    names = (
        "enorm.weight hnorm.weight eh_proj.weight shared_head.norm.weight shared_head.head.weight embed_tokens.weight"
    )
    block = "input_layernorm.weight self_attn.kv_b_proj.weight self_attn.g_proj.weight block_sparse_moe.gate.weight"
    assert {prefix + name for name in f"{names} {block}".split()} <= set(stored)
    assert not [name for name in stored if name.startswith(prefix) and "_res_" in name and "router" not in name]
    assert stored[f"{prefix}eh_proj.weight"].shape == (D, 2 * D)
    again = load_model(tmp_path)
    assert again.config.mtp_layers == 2
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    counted = count_parameters(model.config)
    padding = 2 * (128 - SMALL.kda_heads)
    assert counted.total == counted.text + counted.mtp == sum(p.numel() for p in model.parameters()) - padding
    assert count_parameters(model.config.replace(mtp_layers=0)).total == counted.text


def test_copies_of_embedding_and_head_may_be_absent_but_not_others(tmp_path):
    save_model(make(torch.float32), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    stored, copies = (
        load_file(file),
        ("language_model.model.layers.3.embed_tokens.weight", "language_model.model.layers.3.shared_head.head.weight"),
    )
    file.unlink()
    save_file({n: t for n, t in stored.items() if n not in copies}, tmp_path / "model.safetensors")
    load_model(tmp_path)
    save_file(stored | {copies[1]: stored[copies[1]] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 bad tensors.*shared_head.head.*differs from the model's own"):
        load_model(tmp_path)
    save_file({n: t for n, t in stored.items() if "enorm" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 missing.*layers.3.enorm"):
        load_model(tmp_path)


def test_the_trunk_is_untouched():
    with_mtp, tokens = make(), ids(10)
    without = new_model(SMALL.replace(mtp_layers=0), dtype=torch.float64)
    without.load_state_dict({n: p for n, p in with_mtp.state_dict().items() if not n.startswith("mtp.")})
    with torch.no_grad():
        assert torch.equal(with_mtp.logits(tokens), without.logits(tokens))
    with pytest.raises(ValueError, match="has 1 MTP layers"):
        add_mtp(with_mtp)
    with pytest.raises(ValueError, match="mtp_layers"):
        SMALL.replace(mtp_layers=-1)
