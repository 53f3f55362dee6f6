"""Steps of fixed shapes against steps as they come."""

import pytest
import torch

from rille.model.model import new_model
from rille.model.presets import preset
from rille.serve.engine import Engine
from rille.serve.graphs import DecodeGraphs
from rille.serve.schema import SamplingParams
from tests.serve.test_engine import Scripted, alone, prompt
from tests.train.small import MODEL


def test_fixed_shapes_change_nothing():
    model = new_model(MODEL.replace(init_std=0.2), seed=3)
    served = Engine(model, num_pages=60, hash_unit=64, poison=True)
    (spare,) = served.scheduler.cache.store.allocate(1)
    graphs = DecodeGraphs(model, served.pages, spare, served.longest, sizes=range(1, 5), captures=False)
    served.runner.graphs = graphs
    prompts = [prompt(n, seed=n) for n in (1, 60, 64, 150, 90, 20)]
    lengths = (30, 12, 25, 40, 7, 3)
    params = [SamplingParams(max_tokens=n, temperature=0) for n in lengths]
    results = served.generate(prompts, params)
    assert [one.tokens for (one,) in results] == [alone(model, p, n) for p, n in zip(prompts, lengths, strict=True)]
    sizes = {shape.rows for shape in graphs._slates}
    assert sizes <= {1, 2, 3, 4} and len(sizes) > 1


@pytest.mark.gpu
def test_recorded_steps_agree_with_steps_as_they_come():
    """bf16 on a GPU: sums are split otherwise, so the bits may differ; the figures agree."""
    model = new_model(preset("nano"), dtype=torch.bfloat16, device="cuda", seed=1)
    prompts = [prompt(n, seed=n) for n in (5, 64, 300, 1000, 77)]
    params = SamplingParams(max_tokens=20, temperature=0)
    common = {"num_pages": 200, "hash_unit": 64}
    eager, recorded, ahead = (Engine(model, **common, cuda_graphs=g, overlap=o) for g, o in ((0, 0), (1, 0), (1, 1)))
    for cached in ([0] * 5, [0, 0, 299, 999, 76], [0, 0, 299, 999, 76]):  # then from the cache, among other memory
        results = [served.generate(prompts, params) for served in (eager, recorded, ahead)]
        for (one,), (other,), (last,), hit in zip(*results, cached, strict=True):
            assert one.usage.cached_tokens == other.usage.cached_tokens == hit
            assert (last.tokens, last.logprobs, last.usage) == (other.tokens, other.logprobs, other.usage)
            assert one.tokens[0] == other.tokens[0]
            same = next((n for n in range(20) if one.tokens[n] != other.tokens[n]), 20)
            assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=0.05)
    assert recorded.runner.graphs is not None and recorded.runner.graphs._recorded


@pytest.mark.gpu
def test_recorded_drafts_agree_with_recorded_steps():
    """bf16 on a GPU: guesses that are what plain steps wrote, every third one spoilt. More rows to a product split its
    sums otherwise, so two tokens may change places; up to there the figures agree."""
    model = new_model(preset("nano"), dtype=torch.bfloat16, device="cuda", seed=1)
    prompts = [prompt(n, seed=n) for n in (5, 63, 64, 300, 77, 128, 200, 31)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain = [one for (one,) in Engine(model, num_pages=200, hash_unit=64).generate(prompts, params)]
    drafter = Scripted(model, lambda place: place % 3 == 2)
    drafter.known = {tuple(ids): one.tokens for ids, one in zip(prompts, plain, strict=True)}
    served = Engine(model, num_pages=200, hash_unit=64, drafter=drafter, adaptive_drafts=False)
    (spare,) = served.scheduler.cache.store.allocate(1)
    served.pages.clear([spare])
    served.runner.graphs = DecodeGraphs(model, served.pages, spare, served.longest, most_drafts=4)
    served.scheduler.takes_copies = False
    for _ in range(2):
        drafted, agreed = served.generate(prompts, params), 0
        for one, (other,) in zip(plain, drafted, strict=True):
            same = next((n for n in range(40) if one.tokens[n] != other.tokens[n]), 40)
            assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=0.05)
            agreed += same
        assert agreed > 40
    assert served.stats().accepted > 20
    assert {shape.tokens for shape, _ in served.runner.graphs._recorded} >= {5}
