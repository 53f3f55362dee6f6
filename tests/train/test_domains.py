"""Losses by domain: every target belongs to one, and the parts make the whole."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rille.data.built import open_built
from rille.data.config import DataConfig
from rille.data.corpus import TokenText
from rille.data.loader import held_out_batches
from rille.optim.config import OptimConfig
from rille.train.config import TrainConfig
from rille.train.loop import forward_backward, measured, next_batches, reduce
from rille.train.losses import domain_targets, mean_loss, mean_losses, next_token_loss
from rille.train.pretrain import held_out_measure, set_up
from rille.train.run import Run
from tests.data.sets import build, essay
from tests.train.small import MODEL


@pytest.fixture
def run(tmp_path: Path) -> Run:
    other = [essay(seed).replace("river", "stone").upper() for seed in range(50, 70)]
    dataset = build(tmp_path, {"low": [essay(seed) for seed in range(30)], "high": other}, held_out=0.3)
    width = dataset.tokenizer.vocab_size
    config = TrainConfig(
        out=str(tmp_path / "run"),
        steps=2,
        accumulate=2,
        eval_tokens=2000,
        data=DataConfig(path=str(dataset.directory), vocab_size=width, sequence_length=48, batch_tokens=192),
        optim=OptimConfig(lr=3e-3),
        model=MODEL.replace(vocab_size=width),
    )
    return set_up(config, open_built(config.data))


def test_sequences_name_the_domain_that_their_text_is_of(run: Run):
    tokenizer, seen = run.tokenizer, set()
    for _ in range(10):
        (batch, _) = next_batches(run)
        assert len(batch.domains) == len(batch.lengths)
        for domain, ids in zip(
            batch.domains, np.split(batch.tokens.numpy(), np.cumsum(batch.lengths)[:-1]), strict=True
        ):
            text = tokenizer.decode([i for i in ids.tolist() if i != tokenizer.eos_id])
            letters = [c for c in text if c.isalpha()]
            if letters:
                assert run.domains[domain] == ("high" if all(c.isupper() for c in letters) else "low"), text
            seen.add(domain)
    assert seen == {0, 1}


def test_parts_make_the_whole(run: Run):
    batches = next_batches(run)
    batches[0].targets[:40] = -100
    work = forward_backward(run, batches)
    assert int(work.domain_targets.sum()) == work.targets == 2 * 192 - 40
    reduce(run, work)
    values = measured(run, work, {})
    counts = dict(zip(run.domains, work.domain_targets.tolist(), strict=True))
    whole = sum(values[f"loss/{name}"] * count for name, count in counts.items()) / work.targets
    assert whole == pytest.approx(values["loss"], rel=1e-5)
    only = [next_token_loss(run.model, batch).log_probs.detach().numpy() for batch in batches]
    labels = [np.repeat(batch.domains, batch.lengths) for batch in batches]
    for number, name in enumerate(run.domains):
        total = -sum(float(p[label == number].sum()) for p, label in zip(only, labels, strict=True))
        assert values[f"loss/{name}"] == pytest.approx(total / counts[name], rel=1e-5)


def test_held_out_by_domain_is_that_domain_alone(run: Run):
    corpus = open_built(run.config.data)
    held = corpus.held_out.head(2000)
    assert corpus.held_out_domains is not None
    labels = corpus.held_out_domains[: held.num_documents]
    whole, parts = mean_losses(run.model, run.held_out(), run.domains)
    assert whole == pytest.approx(mean_loss(run.model, held_out_measure(run.config, corpus)()), rel=1e-6)
    assert set(parts) == set(run.domains)
    for number, name in enumerate(run.domains):
        total = count = 0.0
        for document in np.flatnonzero(labels == number):
            alone = _document(held, int(document))
            batches = list(held_out_batches(alone.tokens, alone.boundaries, alone.num_targets, 48))
            total += mean_loss(run.model, batches) * alone.num_targets
            count += alone.num_targets
        assert parts[name] == pytest.approx(total / count, rel=1e-2)  # batches cut documents at other places
    targets = sum(domain_targets(batch, 2) for batch in run.held_out())
    assert targets.sum() == held.num_targets


def _document(text: TokenText, number: int) -> TokenText:
    start, end = (int(x) for x in text.boundaries[number : number + 2])
    return TokenText(text.tokens[start : end + 1], np.array([0, end - start]), text.byte_lengths)


def test_a_run_that_is_longer_than_its_text_is_refused_before_it_begins(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(40)]}, max_epochs=2.0)
    data = DataConfig(path=str(dataset.directory), vocab_size=400, sequence_length=48, batch_tokens=64)
    config = TrainConfig(
        out="unused",
        steps=2 * dataset.num_targets // 64,
        data=data,
        optim=OptimConfig(lr=3e-3),
        model=MODEL.replace(vocab_size=400),
    )
    run = set_up(config, open_built(data))
    for _ in range(config.steps):
        next_batches(run)
    with pytest.raises(ValueError, match=f"allows {2 * dataset.num_targets:,}, enough for {config.steps:,} steps"):
        set_up(replace(config, steps=config.steps + 1), open_built(data))
    staged = replace(config, stages=("at=5 accumulate=9",))
    with pytest.raises(ValueError, match="steps 5 to"):
        set_up(staged, open_built(data))
