"""How an engine is set up. No torch here, and nothing of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rille.misspelt import named_fields
from rille.serve.tools import fits


@named_fields
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine (`rille.Engine`) uses its machine. Lengths are tokens."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in memory and the arithmetic."""

    experts: Literal["values", "mxfp4"] = "values"
    """mxfp4 keeps routed experts packed, as the checkpoint must have them: a quarter of their bytes in bf16."""

    memory_gib: float | None = None
    """The pool of pages; by default 1 on a CPU and 80 % of what is free beside the weights on a GPU."""

    num_pages: int | None = None
    """The same in pages, instead of memory_gib."""

    hash_unit: int | None = None
    """Prefixes are found again at multiples of this, itself a multiple of 64.
    By default 64 to 512, by how much a state of the model takes beside latents: the larger, the fewer are kept.
    Prompts up to 512 tokens are then found again at these multiples alone, which cost less than exact ends."""

    checkpoint_interval: int = 32_768
    """Keep the KDA state of a long prompt every so many tokens (a multiple of hash_unit, 0: never).
    It is kept besides where a prompt ends and where prompts part."""

    exact_ends: bool = True
    """Keep the state also before a prompt's last token, where a reply ended and where prompts part, at any token.
    The same prompt again, the next turn, or another one behind the same beginning then costs no part of a hash unit.
    Not with deterministic."""

    host_gib: float = 0.0
    """Pages that are evicted go to so much host memory and come back from there.
    Half of it is for sequences that are set aside where preemption is offload."""

    max_running: int = 64
    """Sequences that run at once."""

    max_queued: int = 1_024
    """Sequences that may wait; more are refused (429)."""

    token_budget: int | None = None
    """Tokens of one step, prompts and replies together; by default 2,048 on a CPU and 8,192 on a GPU."""

    max_length: int | None = None
    """Tokens that one sequence may come to, prompt and reply; by default as many as the checkpoint was made for."""

    preemption: Literal["recompute", "offload"] = "recompute"
    """What happens to sequences when memory is short: computed again later, or copied to host memory (host_gib)."""

    drafter: Literal["none", "ngram", "mtp"] = "none"
    """Guess tokens ahead: from what was read and written (ngram), or with the model's MTP layer."""

    draft_length: int = 4
    """The most tokens to guess in a step; how many it is follows from how many come true."""

    adaptive_drafts: bool = True
    """Choose the number of guesses in every step by what they gain, down to none."""

    cuda_graphs: bool = True
    """Record decoding steps on a GPU and replay them. Elsewhere, and with deterministic, there is nothing to record."""

    recorded_prompts: bool = True
    """Record steps with prompts too, where decoding is recorded: in padded shapes, once a shape has come twice.
    Without it such a step runs op by op, which takes the host several times as long as it takes a GPU."""

    recorded_drafts: bool = True
    """Verify drafts of ngram inside recorded steps, where steps are recorded.
    Without it a step with drafts runs op by op, which is so much slower than a recorded one that few are worth it."""

    gather_prompts: bool = True
    """Prompts that come while others write wait for each other, where steps are recorded.
    They wait for as long as a step with prompts takes longer than a recorded one, 0.1 s at most.
    Started one by one they would hold up all that is written."""

    overlap: bool = True
    """While the device computes a recorded step prepare the next one; tokens are seen one step late.
    What needs them at once (grammars, penalties, drafts, prompts) waits for them in any case."""

    deterministic: bool = False
    """Every request is computed as if it were alone: the same bits whatever runs beside it and whatever is cached.
    Slow; without a drafter."""

    poison: bool = False
    """Fill free memory with NaN between steps, to find what reads it. Slow."""

    def __post_init__(self):
        check_kinds(self)
        if self.hash_unit is not None and (self.hash_unit < 64 or self.hash_unit % 64):
            raise ValueError(f"hash_unit is {self.hash_unit}; it must be a multiple of 64")
        check_max_length(self.max_length)
        if self.deterministic and self.drafter != "none":
            raise ValueError(f"deterministic goes without a drafter, but drafter is {self.drafter!r}; set it to none")
        if self.preemption == "offload" and not self.host_gib:
            raise ValueError("preemption 'offload' needs host memory: set host_gib above 0")
        if self.draft_length < 1:
            raise ValueError(f"draft_length is {self.draft_length}; it must be at least 1, or drafter none")
        if self.num_pages is not None and self.memory_gib is not None:
            raise ValueError(f"memory_gib is {self.memory_gib} and num_pages {self.num_pages}; give one of them")
        for name in ("memory_gib", "num_pages"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.host_gib < 0:
            raise ValueError(f"host_gib is {self.host_gib}; it must not be negative")


def check_max_length(max_length: int | None) -> None:
    """Raise ValueError where no prompt could have a reply."""
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}; it must be at least 2, a token to read and one to write")


def check_kinds(config: Any) -> None:
    """Raise ValueError for the first field of a dataclass that holds no value of its kind, or an infinite one."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not fits(value, hint) or (isinstance(value, float) and not isfinite(value)):
            kinds = get_args(hint) or (hint,)
            words = kinds if get_origin(hint) is Literal else [getattr(k, "__name__", k) for k in kinds]
            text = " or ".join(map(str, words)).replace("NoneType", "None")
            raise ValueError(f"{name} is {value!r:.80}; it must be {text}")
