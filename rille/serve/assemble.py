"""The parts of an engine, from its settings."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path

import torch

from rille.model.arguments import as_path
from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.model import K3
from rille.model.packed import has_packed_experts
from rille.serve.graphs import SIZES, DecodeGraphs
from rille.serve.limits import SchedulerConfig
from rille.serve.paged import Pages, layout_of
from rille.serve.prefix import PrefixCache
from rille.serve.prompts import PromptGraphs, obstacle
from rille.serve.retention import LARGEST_UNIT, Retention, unit_for
from rille.serve.runner import Runner
from rille.serve.scheduler import Scheduler
from rille.serve.settings import EngineConfig
from rille.serve.speculation import Drafter, MtpDrafter, NgramDrafter
from rille.serve.tier import HostTier
from rille.serve.trial import can_try
from rille.text.tokenizer import load_tokenizer
from rille.text.vocabulary import Tokenizer

REMEMBERED = 1 << 18  # boundaries that are known after their pages are gone, at most
BOUNDARY_BYTES = 384  # of host memory for each, and its place among the ends
POOL_TO_REMEMBERED = 16  # the pool has at least so many times their memory
GRAPHS_SHARE = 0.25  # of what is free beside the pool: what recorded steps with prompts may take
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(checkpoint: str | Path | K3, config: EngineConfig) -> tuple[K3, Tokenizer | None]:
    if isinstance(checkpoint, K3):
        if config.experts == "mxfp4" and not has_packed_experts(checkpoint):
            raise ValueError("experts 'mxfp4' is for a checkpoint that is loaded; the given model's experts are values")
        return checkpoint, None
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use; give device cpu")
    place = find_checkpoint(as_path(checkpoint))
    has_tokenizer = any((place / name).is_file() for name in ("tiktoken.model", "tokenizer.json"))
    tokenizer = load_tokenizer(place) if has_tokenizer else None
    model = load_model(place, dtype=DTYPES[config.dtype], device=config.device, experts=config.experts)
    return model, tokenizer


def count_pages(model: K3, config: EngineConfig) -> int:
    """As asked, or as many as fit the memory. Raises ValueError where that is none, or more than a host has."""
    size = layout_of(model.config, model.dtype).page_bytes
    if model.device.type == "cpu":
        asked = size * config.num_pages if config.num_pages is not None else 2**30 * (config.memory_gib or 1)
        if asked > (whole := host_bytes()):
            raise ValueError(
                f"a pool of {asked / 2**30:,.1f} GiB is more than this machine's memory, {whole / 2**30:,.1f} GiB; "
                "give a smaller memory_gib or num_pages"
            )
    if config.num_pages is not None:
        return config.num_pages
    if config.memory_gib is not None:
        room = int(config.memory_gib * 2**30)
    elif model.device.type == "cuda":
        room = int(0.8 * torch.cuda.mem_get_info(model.device)[0])
    else:
        room = 2**30
    if room < size:
        raise ValueError(f"memory_gib: {room / 2**30:.3f} GiB hold no page of {size / 2**30:.3f} GiB; give more")
    return room // size


def host_bytes() -> float:
    """Memory of the host, endless where the system does not tell."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def count_remembered(pool_bytes: int) -> int:
    """Boundaries to remember: where the pool is small they may not grow to its size."""
    return max(1, min(REMEMBERED, pool_bytes // POOL_TO_REMEMBERED // BOUNDARY_BYTES))


def new_tiers(pages: Pages, config: EngineConfig) -> tuple[HostTier | None, HostTier | None]:
    """Host memory behind the cache, and for sequences that are set aside. Raises ValueError for less than what one
    sequence goes on from, a state and a page of latents: it would never be used, and nobody would know."""
    size, least = pages.layout.page_bytes, pages.layout.groups + 1
    host, offloads = int(config.host_gib * 2**30) // size, config.preemption == "offload"
    if not config.host_gib:
        return None, None
    if host < (need := least * (1 + offloads)):
        raise ValueError(
            f"host_gib is {config.host_gib:g}, {host} pages of {size:,} bytes; a state and some latents take {least} "
            f"pages{', twice with offload' * offloads}: give {-(-need * size // 2**20) / 2**10:g} or more, or 0"
        )
    in_tier = host // 2 if offloads else host
    tier = HostTier(in_tier, pages.read, pages.write)
    return tier, HostTier(host - in_tier, pages.read, pages.write) if offloads else None


def new_scheduler(pages: Pages, num_pages: int, config: EngineConfig, max_positions: int) -> Scheduler:
    """The scheduler over a pool. max_positions: tokens that the checkpoint was made for. Raises ValueError where the
    pool holds not even one token and the next."""
    layout, (tier, park) = pages.layout, new_tiers(pages, config)
    retention = Retention(
        interval=config.checkpoint_interval,
        exact=config.exact_ends and not config.deterministic,
        exact_above=LARGEST_UNIT if config.hash_unit is None else 0,
    )
    unit = config.hash_unit if config.hash_unit is not None else unit_for(layout.page_tokens, layout.groups)
    cache = PrefixCache(
        num_pages,
        layout.page_tokens,
        layout.groups,
        unit=unit,
        retention=retention,
        tier=tier,
        remember=count_remembered(num_pages * layout.page_bytes),
    )
    max_length = config.max_length if config.max_length is not None else max_positions
    budget = config.token_budget
    limits = SchedulerConfig(
        max_running=config.max_running,
        token_budget=budget if budget is not None else 8_192 if pages.device.type == "cuda" else 2_048,
        max_queued=config.max_queued,
        max_length=max_length,
        deterministic=config.deterministic,
    )
    scheduler = Scheduler(cache, limits, park)
    if scheduler.longest < 2:
        raise ValueError(
            f"a pool of {num_pages} pages, of which the state of a sequence takes {layout.groups} and each "
            f"{layout.page_tokens} tokens one more, has no room for a sequence (at most {max_length} tokens); "
            "give more memory (num_pages or memory_gib), or a larger max_length"
        )
    return scheduler


def new_drafter(model: K3, config: EngineConfig, own: Drafter | None = None) -> Drafter | None:
    """The caller's own or the one that the settings name. Raises ValueError where the model or the settings do not
    allow it."""
    if own is not None and not all(hasattr(own, name) for name in ("reads_hidden", "propose", "observe", "forget")):
        raise ValueError(
            f"drafter is {own!r:.80}; it must be none, ngram, mtp, or an object with the Drafter's methods"
        )
    if own is not None and config.deterministic:
        raise ValueError(f"deterministic goes without a drafter, but there is {type(own).__name__}")
    if own is not None or config.drafter == "none":
        return own
    return MtpDrafter(model) if config.drafter == "mtp" else NgramDrafter()


def new_graphs(model: K3, pages: Pages, scheduler: Scheduler, config: EngineConfig) -> DecodeGraphs | None:
    """Recorded decoding, where there is a GPU; a page of the pool is set apart for its idle rows."""
    if pages.device.type != "cuda" or not config.cuda_graphs or config.deterministic:
        return None
    if reason := obstacle(model, pages, with_prompts=False):
        warnings.warn(f"decoding runs op by op, not recorded: {reason}", stacklevel=2)
        return None
    spare = scheduler.cache.store.allocate(1)
    if spare is None or scheduler.cache.available < 1:
        raise ValueError("the pool has no page to spare for recorded steps; give more memory, or cuda_graphs False")
    scheduler.cache.reserved = 1
    pages.clear(spare)
    sizes = [size for size, less in zip(SIZES, (0, *SIZES), strict=False) if less < config.max_running]
    records = config.drafter == "ngram" and config.recorded_drafts and _can_record_drafts(model, pages, sizes[-1])
    scheduler.takes_copies, most = not records, config.draft_length if records else 0
    return DecodeGraphs(model, pages, spare[0], scheduler.longest, sizes, most)


def new_prompts(
    model: K3, pages: Pages, scheduler: Scheduler, config: EngineConfig, graphs: DecodeGraphs | None
) -> PromptGraphs | None:
    """Recorded steps with prompts, where decoding is recorded, whose spare page they share."""
    if graphs is None or not config.recorded_prompts:
        return None
    if reason := obstacle(model, pages):
        warnings.warn(f"steps with prompts run op by op, not recorded: {reason}", stacklevel=2)
        return None
    room = int(GRAPHS_SHARE * torch.cuda.mem_get_info(pages.device)[0])
    return PromptGraphs(model, pages, [graphs.spare_page], scheduler.longest, config.max_running, room)


def record_steps(runner: Runner, scheduler: Scheduler, config: EngineConfig) -> None:
    """Have the runner's steps recorded, as far as they can be."""
    parts = (runner.model, runner.pages, scheduler, config)
    runner.graphs = new_graphs(*parts)
    runner.prompts = new_prompts(*parts, runner.graphs)


def _can_record_drafts(model: K3, pages: Pages, rows: int) -> bool:
    """Whether recorded steps may verify drafts; a warning says why not. They need room for the states of all rows."""
    free = torch.cuda.mem_get_info(pages.device)[0]
    need = rows * pages.layout.groups * pages.layout.page_bytes
    if not can_try(model):
        reason = "no kernel of this device verifies drafts of this model"
    elif need > free // 2:
        reason = f"they need {need / 2**30:.2f} GiB beside the pool, and {free / 2**30:.2f} are free"
    else:
        return True
    warnings.warn(f"steps with drafts run op by op, not recorded: {reason}", stacklevel=2)
    return False
