"""What a model costs on paper: parameters, FLOPs a token, memory. Counted from the parameter table; no torch.

A multiplication and an addition are two FLOPs. Counted are products: matrices, convolutions, the KDA recurrence, MLA
scores and values, Attention-Residual scores and mixtures. Left out: norms, activations, softmax, top-k, and the
recomputation and the blocked forms of an implementation.

    matrix [O, I]             2 O I                      a routed expert counts for the A of E that a token uses
    short convolution         2 W for each of 3 H K channels
    KDA recurrence            7 K V for each head        decay 1, S^T k 2, beta k u^T 2, S^T q 2
    MLA over t rows           2 t (Kq + V) for each head expanded;    2 t (R + Ks + R) absorbed, as decoding runs it
    AttnRes over R sources    4 R D at each site
    training                  3 x forward: the backward pass makes two products for each one

A token of a sequence of T tokens sees (T + 1) / 2 rows on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rille.model.config import K3Config
from rille.model.names import Entry, parameter_table, text_table

# Parts of a model in the order of a table: the words that a parameter's name is recognised by.
_BESIDE = (
    ("multi-token prediction", ("mtp.",)),
    ("vision tower", ("vision.tower.",)),
    ("vision projector", ("vision.projector.",)),
)
_PARTS = (
    ("embedding", ("embed",)),
    ("routed experts", (".experts.",)),
    ("shared experts", (".shared.",)),
    ("router and latent projections", (".router", ".latent_")),
    ("attention residuals", ("_mix.",)),
    ("dense feed-forward", (".ffn.",)),
    ("norms", ("attn_norm", "ffn_norm", "norm")),
    ("head", ("head",)),
)
BF16, FP32 = 2, 4
MXFP4_BYTES = 17 / 32  # 4 bits and a scale byte for each 32
TRAINING_BYTES = 16  # fp32 weight, gradient and two moments of AdamW


@dataclass(frozen=True)
class Part:
    """Parameters of one part of a model: all, and those that one token of text uses."""

    name: str
    total: int
    active: int

    @property
    def is_text(self) -> bool:
        """Whether it belongs to the language model proper: not to vision or MTP layers, which stand beside it."""
        return self.name not in dict(_BESIDE)


def parts(c: K3Config) -> list[Part]:
    """Parameters by part. Their sums are `count_parameters`: the head is active, a looked-up embedding is not."""
    sums: dict[str, list[int]] = {}
    for entry in parameter_table(c):
        total, active = sums.setdefault(_part(c, entry), [0, 0])
        unused = entry.parameter.startswith(("vision.", "mtp.")) or (
            entry.parameter == "embed" and not c.tied_embeddings
        )
        used = 0 if unused else _active(c, entry)
        sums[_part(c, entry)] = [total + entry.count, active + used]
    return [Part(name, total, active) for name, (total, active) in sums.items()]


def _active(c: K3Config, entry: Entry) -> int:
    return entry.count // c.num_experts * c.active_experts if entry.experts else entry.count


def _part(c: K3Config, entry: Entry) -> str:
    beside = [name for name, words in _BESIDE if entry.parameter.startswith(words)]
    if beside:
        return beside[0]
    if ".attn." in entry.parameter:
        return "MLA" if c.is_mla(int(entry.parameter.split(".")[1])) else "KDA"
    return next(name for name, words in _PARTS if any(word in entry.parameter for word in words))


def matrix_flops(c: K3Config) -> int:
    """FLOPs of one token in all matrices, the head included: two for each weight that it meets."""
    weights = sum(
        _active(c, entry)
        for entry in text_table(c)
        if entry.kind != "vector" and not (entry.parameter == "embed" and not c.tied_embeddings)
    )
    return 2 * weights


def fixed_flops(c: K3Config) -> int:
    """FLOPs of one token that do not depend on how many came before: matrices, convolutions, recurrence, AttnRes."""
    conv = 2 * c.conv_width * 3 * c.kda_width
    recurrence = 7 * c.kda_heads * c.kda_head_dim**2
    return matrix_flops(c) + len(c.kda_layers) * (conv + recurrence) + 4 * c.hidden_size * sum(sources(c))


def sources(c: K3Config) -> Iterator[int]:
    """How many sources each Attention-Residual site mixes. A site that reads the running sum alone mixes nothing."""
    if not c.attends_depth:
        return
    finished = 0
    for layer in range(c.num_layers):
        for site in ("attention", "feed-forward"):
            if finished:
                yield finished + 1
            closes = c.residual == "attn_res_full" or (site == "attention" and c.opens_block(layer))
            finished += closes
    yield finished + 1


def forward_flops(c: K3Config, context: int) -> int:
    """FLOPs a token of a forward pass over a whole sequence of `context` tokens, on average over them."""
    per_row = 2 * c.mla_heads * (c.query_dim + c.value_dim)
    return fixed_flops(c) + len(c.mla_layers) * per_row * (context + 1) // 2


def training_flops(c: K3Config, context: int) -> int:
    """FLOPs a token of forward and backward over sequences of `context` tokens."""
    return 3 * forward_flops(c, context)


def decode_flops(c: K3Config, context: int) -> int:
    """FLOPs of the token that follows `context` tokens in a cache of latents, absorbed.

    The key and value up-projections meet the query and the output instead of the rows: the same products for one token.
    """
    per_row = 2 * c.mla_heads * (c.cache_dim + c.kv_rank)
    return fixed_flops(c) + len(c.mla_layers) * per_row * (context + 1)


def weight_bytes(c: K3Config, *, mxfp4: bool) -> int:
    """Bytes of a checkpoint's tensors: bf16, the official fp32 ones, routed experts in bf16 or MXFP4."""
    sizes = {"bf16": float(BF16), "f32": float(FP32), "expert": MXFP4_BYTES if mxfp4 else float(BF16)}
    return round(sum(entry.count * sizes[entry.storage] for entry in parameter_table(c)))


def training_bytes(c: K3Config) -> int:
    """Weights, gradients and AdamW's moments in fp32, without activations."""
    return TRAINING_BYTES * sum(entry.count for entry in parameter_table(c))


def state_bytes(c: K3Config) -> int:
    """What KDA layers remember of one sequence, however long: fp32 states and bf16 convolution tails."""
    state = c.kda_heads * c.kda_head_dim**2 * FP32
    tail = (c.conv_width - 1) * 3 * c.kda_width * BF16
    return len(c.kda_layers) * (state + tail)


def cache_bytes(c: K3Config) -> int:
    """What MLA layers remember of one token, in bf16: latent and shared key."""
    return len(c.mla_layers) * c.cache_dim * BF16
