"""What the first request would wait for, done before there is one: what a server has at its start is what it needs."""

from __future__ import annotations

from rille.serve.chain import Chain
from rille.serve.holding import Holding
from rille.serve.paged import Pages
from rille.serve.prefix import PrefixCache
from rille.serve.runner import Runner
from rille.serve.schema import Request, SamplingParams
from rille.serve.sequences import Part, Sequence
from rille.serve.store import Entry

LENGTH = 64  # tokens: enough to pass through every library that a layer calls


def warm_up(pages: Pages, cache: PrefixCache, runner: Runner) -> None:
    """Take the memory of the pool, and run a prompt through the model in pages that are free again afterwards: nothing
    is counted or stored. Called in the thread that steps, since allocators and products have buffers by threads. Where
    too few pages are free there were requests, which have done the same."""
    pages.touch()
    pool = cache.store.pool
    count = min(LENGTH, (pool.num_free - cache.groups) * cache.page_tokens)
    if count < 1:
        return
    taken, chain = pool.take(cache.pages_for(count)), Chain([0] * count, cache.unit)
    request = Request(prompt=chain.ids, params=SamplingParams(max_tokens=1))
    state, latents = tuple(taken[: cache.groups]), taken[cache.groups :]
    holding = Holding(chain, latents=[Entry((page,), count) for page in latents], state=state)
    pages.clear(state)
    runner.run([Part(Sequence(request, "", 0, 0, chain, "", holding=holding), 0, count)])
    pool.give(taken)
