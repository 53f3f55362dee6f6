"""Multi-token prediction: layers after the last that predict one token further each, and draft with it.

The trunk gives h_i, from which the head predicts token t_{i+1}. With s^0 = h, MTP layer k = 1, 2, ... computes at row i

    x = W [RMSNorm(e); RMSNorm(s^{k-1}_i)]        e = embedding of t_{i+k}, zero at the first row of a sequence
    s^k = Block(x)                                MLA and LatentMoE with an ordinary residual stream
    logits of t_{i+k+1} = head(RMSNorm(s^k_i))    embedding and head are the trunk's

The report trains one such layer and later makes a draft of it; the release has none. Names and the order of the two
halves are those of the public loaders (`names.mtp_table`).

Suffixes: N packed tokens, S sequences, D width, W vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rille.model.allocate import Allocate
from rille.model.arguments import as_temperature, check_ids, check_packing, check_tokens, check_weights, kind, whole
from rille.model.attn_res import Depth
from rille.model.block import Block
from rille.model.config import K3Config
from rille.model.context import Context
from rille.model.initialise import initialise
from rille.model.memory import Memory
from rille.model.names import mtp_config
from rille.ops.cross_entropy import CrossEntropy, linear_cross_entropy
from rille.ops.embedding import embed
from rille.ops.norm import rms_norm
from rille.packing import Packing

if TYPE_CHECKING:
    from rille.model.balance import Counts


class MTPLayer(nn.Module):
    """One layer: `layer(embedded, state, ctx) -> state`; `final` is what the head reads."""

    def __init__(self, c: K3Config, number: int, new: Allocate) -> None:
        super().__init__()
        d = c.hidden_size
        self.embed_norm, self.hidden_norm, self.proj = new(d), new(d), new(d, 2 * d)
        self.block, self.norm = Block(mtp_config(c), c.num_layers + number, new), new(d)
        self.eps = c.norm_eps

    def forward(self, embedded_ND: Tensor, state_ND: Tensor, ctx: Context) -> Tensor:
        embedded_ND = embedded_ND.masked_fill(ctx.packing.positions[:, None] == 0, 0)
        halves = rms_norm(embedded_ND, self.embed_norm, self.eps), rms_norm(state_ND, self.hidden_norm, self.eps)
        return self.block(Depth(linear(torch.cat(halves, dim=-1), self.proj)), ctx).sum

    def final(self, state_ND: Tensor) -> Tensor:
        return rms_norm(state_ND, self.norm, self.eps)


class Trunk(Protocol):
    """What prediction further ahead asks of the model (`rille.model.K3`) that it stands on."""

    config: K3Config
    embed: nn.Parameter
    mtp: nn.ModuleList | None

    @property
    def head_weight(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def mtp_layers(model: Trunk) -> list[MTPLayer]:
    """The layers of a model. Raises ValueError where there are none."""
    if model.mtp is None:
        raise ValueError("mtp: this model has no multi-token-prediction layer; see config.mtp_layers, or `add_mtp`")
    return [layer for layer in model.mtp if isinstance(layer, MTPLayer)]


def add_mtp(model: Trunk, layers: int = 1, seed: int = 0) -> None:
    """Give a model freshly initialised MTP layers, in place. Raises ValueError where it has some."""
    if model.mtp is not None or layers < 1:
        raise ValueError(f"mtp: the model has {model.config.mtp_layers} MTP layers, {layers} more cannot be added")
    model.config = model.config.replace(mtp_layers=layers)
    new = Allocate(model.dtype, model.device)
    model.mtp = nn.ModuleList(MTPLayer(model.config, n, new) for n in range(layers))
    initialise(model.mtp, model.config.init_std, seed)


def mtp_loss(
    model: Trunk, hidden: Tensor, tokens: Tensor, targets: Tensor, packing: Packing, counts: Counts | None = None
) -> list[CrossEntropy]:
    """The loss of each MTP layer, -log p(t_{i+k+1}) in nats, never across sequences.

    hidden [N, D]: the trunk's, as `model(tokens, ctx)` gave them (detach them to train the MTP layers alone). tokens
    int64 [N], and targets int64 [N]: the token after each one, -100 where it does not count, as for the trunk's own
    loss. packing: of both; its sequences start here. counts: to count the experts' load. Rows whose token t_{i+k} lies
    beyond their sequence are left out.

    Raises ValueError for a model without MTP layers or sequences with history.
    """
    layers = mtp_layers(model)
    if any(packing.consumed):
        raise ValueError(f"mtp_loss: the sequences continue after {list(packing.consumed)} tokens; give whole ones")
    tokens, targets = tokens.to(hidden.device), targets.to(hidden.device)
    state_ND, results = hidden, []
    rows, lengths = np.arange(packing.num_tokens), np.array(packing.lengths, dtype=np.int64)
    for ahead, layer in enumerate(layers, 1):
        kept, lengths = _without_last(lengths)
        state_ND, rows = state_ND[torch.from_numpy(kept).to(hidden.device)], rows[kept]
        there = torch.from_numpy(rows + ahead).to(hidden.device)
        ctx = Context(Packing.of(lengths.tolist(), device=hidden.device), counts=counts)
        state_ND = layer(embed(tokens[there], model.embed), state_ND, ctx)
        results.append(linear_cross_entropy(layer.final(state_ND), model.head_weight, targets[there]))
    return results


def _without_last(lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are left when each sequence loses its last one, and the lengths then."""
    last = np.cumsum(lengths_S)[lengths_S > 0] - 1
    return np.delete(np.arange(lengths_S.sum()), last), np.maximum(lengths_S - 1, 0)


def new_draft_memory(model: Trunk, num_sequences: int = 1) -> Memory:
    """The memory of the drafter: the latents of the MTP layer. The trunk's memory is another one."""
    mtp_layers(model)
    c = model.config
    return Memory(mtp_config(c), num_sequences, model.dtype, model.device, drafting_layers(c))


def drafting_layers(c: K3Config) -> range:
    return range(c.num_layers, c.num_layers + 1)


@torch.no_grad()
def draft(
    model: Trunk,
    hidden: Tensor,
    tokens: Tensor,
    memory: Memory | None = None,
    *,
    packing: Packing | None = None,
    count: int = 1,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Guess the next `count` tokens of each sequence: int64 [S, count], and their distributions, fp32 [S, count, W].

    hidden [N, D]: final hidden states of the trunk for the rows since the last draft; tokens int64 [N]: the token that
    FOLLOWS each of those rows (the last one is the newest, which the trunk has not seen). packing: the rows of each
    sequence, at least one; by default one sequence. memory: from `new_draft_memory`, advanced by these rows; None for
    sequences that start here.

    The first guess reads the last row; each further one the MTP layer's own state and its last guess, and leaves no
    trace in the memory. temperature 0 takes the likeliest token (the distributions are then those of temperature 1),
    else the guess is drawn from softmax(logits / temperature) with the generator,
    which must be of the device that the model is on.

    Raises ValueError for a model with no or several MTP layers, or rows that do not fit the tokens, the packing or the
    memory.
    """
    layers = mtp_layers(model)
    check_weights(model.device)
    check_tokens(tokens, model.device)
    if packing is not None:
        check_packing(packing, tokens, model.device)
    memory = memory or new_draft_memory(model, packing.num_sequences if packing is not None else 1)
    if not isinstance(memory, Memory):
        raise ValueError(f"memory must come from model.new_draft_memory(), not be {kind(memory)}")
    memory.check(mtp_config(model.config), model.dtype, model.device, drafting_layers(model.config))
    packing = packing if packing is not None else memory.packing([len(tokens)])
    count = whole(count, "draft: count", 1)
    temperature = as_temperature(temperature)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"draft: generator is {kind(generator)}; give a torch.Generator or None")
    _check_draft(model, layers, hidden, tokens, packing)
    last_S = packing.starts[1:].long() - 1
    state_SD = _step(model, layers[0], hidden, tokens, packing, memory)[last_S]
    seen, guesses, distributions = list(memory.lengths), [], []
    while True:
        logits_SW = linear(layers[0].final(state_SD), model.head_weight).float()
        probabilities_SW = torch.softmax(logits_SW / (temperature or 1.0), dim=-1)
        if temperature == 0:
            guess_S = logits_SW.argmax(-1)
        else:
            guess_S = torch.multinomial(probabilities_SW, 1, generator=generator)[:, 0]
        guesses.append(guess_S)
        distributions.append(probabilities_SW)
        if len(guesses) == count:
            break
        following = memory.packing([1] * len(seen))
        state_SD = _step(model, layers[0], state_SD, guess_S, following, memory)
    memory.lengths = seen  # the latents of guesses stay behind the end, where the next rows overwrite them
    return torch.stack(guesses, dim=1), torch.stack(distributions, dim=1)


def _step(
    model: Trunk, layer: MTPLayer, state_ND: Tensor, tokens_N: Tensor, packing: Packing, memory: Memory
) -> Tensor:
    memory.reserve(packing)
    state_ND = layer(embed(tokens_N.to(model.device), model.embed), state_ND, Context(packing, memory))
    memory.advance(packing)
    return state_ND


def _check_draft(model: Trunk, layers: list[MTPLayer], hidden: Tensor, tokens: Tensor, packing: Packing) -> None:
    if len(layers) != 1:
        raise ValueError(f"draft: made for one MTP layer, the model has {len(layers)}")
    shape = (len(tokens), model.config.hidden_size)
    if not isinstance(hidden, Tensor) or hidden.shape != shape or packing.num_tokens != len(tokens):
        raise ValueError(
            f"draft: hidden {kind(hidden)}, tokens {list(tokens.shape)} and a packing of {packing.num_tokens} rows; "
            f"want {list(shape)}, [{shape[0]}] and {shape[0]}"
        )
    if hidden.dtype != model.dtype or hidden.device != model.device:
        raise ValueError(
            f"draft: hidden is {hidden.dtype} on {hidden.device}, the model {model.dtype} on {model.device}; give what "
            "model.hidden returned"
        )
    if min(packing.lengths, default=0) < 1:
        raise ValueError(f"draft: rows {list(packing.lengths)}; each sequence needs at least one")
    check_ids(tokens, packing, model.config.vocab_size)
