"""What those who watch are told can be resumed can be, as long as nobody tells them otherwise: a state whose latents
went before it would be a promise that is not kept, and pages that nobody can use."""

from random import Random

import pytest

from rille.serve.chain import Chain
from rille.serve.kv_events import Announcer, BlockStored
from rille.serve.schema import Refused
from tests.serve.test_scheduler import FakeServer, ids

UNIT, STEPS = 16, 250


class Listener(Announcer):
    """Knows the checkpoints under which blocks were told, and which blocks are told now."""

    def __init__(self) -> None:
        super().__init__(self.hear)
        self.blocks: set[bytes] = set()
        self.checkpoints: dict[bytes, tuple[Chain, int]] = {}

    def resumable(self, chain, position):
        longer = Chain([*chain.ids[:position], 1], chain.unit)  # at least one token is computed
        self.checkpoints[chain.at(position)] = longer, position
        super().resumable(chain, position)

    def gone(self, key):
        del self.checkpoints[key]
        super().gone(key)

    def hear(self, event):
        hashes = set(event.block_hashes)
        is_new = isinstance(event, BlockStored)
        assert hashes.isdisjoint(self.blocks) if is_new else hashes <= self.blocks
        self.blocks = self.blocks | hashes if is_new else self.blocks - hashes


def come(server, random, history):
    """A prompt that goes on from an earlier one, somewhere."""
    old = random.choice(history)
    prompt = [*old[: random.randrange(1, len(old) + 1)], *(random.randrange(50) for _ in range(random.randrange(30)))]
    history[random.randrange(len(history))] = prompt[:150]
    try:
        return server.submit(prompt[:150], max_tokens=random.randrange(1, 20))
    except Refused:
        return []


@pytest.mark.parametrize("seed", [*range(5), 113])
@pytest.mark.parametrize("page_tokens", [UNIT, 40])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_announced_can_be_resumed(seed, page_tokens, exact):
    random, listener = Random(seed), Listener()
    pages = random.choice([20, 30, 50])
    parts = {"tier": random.choice([0, 30]), "token_budget": random.choice([16, 64])}
    server = FakeServer(pages, page_tokens, 2, UNIT, exact=exact, **parts)
    server.cache.store.watcher = listener
    history, running, num_told = [ids(random.randrange(20, 150), seed=n) for n in range(5)], [], 0
    for _ in range(STEPS):
        if random.random() < 0.4 and server.scheduler.num_waiting < 4:
            running += come(server, random, history)
        if running and random.random() < 0.05:
            server.scheduler.finish(running.pop(random.randrange(len(running))))
        server.step()
        for chain, position in listener.checkpoints.values():
            assert server.cache.lookup(chain).resumed >= position // UNIT * UNIT, (position, server.now)
        num_told += len(listener.blocks)
    assert num_told > STEPS
