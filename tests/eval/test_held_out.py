"""Bits per byte: the training's own number on its own text, bytes counted from the text, sources told apart."""

import json
from dataclasses import replace
from math import log

import numpy as np
import pytest

from rille.cli import main
from rille.data.corpus import bits_per_byte, load_corpus
from rille.data.loader import held_out_batches
from rille.eval.config import HeldOutConfig
from rille.eval.held_out import held_out
from rille.eval.opened import head
from rille.train.losses import mean_loss
from rille.train.pretrain import pretrain
from tests.train.small import small_config


def test_equals_the_number_of_training(run, opened, tmp_path, capsys):
    text = load_corpus(run / "corpus").held_out
    batches = held_out_batches(text.tokens, text.boundaries, 10**6, 48)
    loss = mean_loss(opened.model, batches)
    [row] = held_out(HeldOutConfig(checkpoint=str(run), context=48, batch_tokens=100, out=str(tmp_path)))
    assert row["tokens"] == text.num_targets
    assert row["nats a token"] == pytest.approx(loss, abs=1e-5)
    assert row["bits a byte"].mean == pytest.approx(bits_per_byte(loss, text.bytes_per_token), abs=1e-5)
    saved = json.loads((tmp_path / "held-out.json").read_text())
    assert saved["rows"][0]["bits a byte"]["mean"] == row["bits a byte"].mean
    assert (tmp_path / "held-out.png").read_bytes().startswith(b"\x89PNG")
    assert "bits a byte" in capsys.readouterr().out


def test_bytes_are_those_of_the_text(run, tmp_path):
    (tmp_path / "a.txt").write_text("def größe(x):\n    return x\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("0123456789" * 20, encoding="utf-8")
    sources = (f"code={tmp_path / 'a.txt'}", f"digits={tmp_path / 'b.txt'}")
    rows = held_out(HeldOutConfig(checkpoint=str(run), sources=sources))
    assert [row["source"] for row in rows] == ["code", "digits", "all"]
    sizes = [(tmp_path / name).stat().st_size for name in ("a.txt", "b.txt")]
    assert [row["bytes"] for row in rows] == [*sizes, sum(sizes)]
    nats = [row["nats a token"] * row["tokens"] for row in rows]
    assert nats[2] == pytest.approx(nats[0] + nats[1])
    assert rows[2]["bits a byte"].mean == pytest.approx(nats[2] / log(2) / sum(sizes))


def test_a_built_set_has_a_source_a_domain(run, tmp_path):
    config = small_config(tmp_path)
    data = ["data", "build", f"a={config.data.path}", f"b={config.data.path}/00.py", "--plain", "a", "b"]
    out = str(tmp_path / "set")
    assert main([*data, "--held-out", "0.3", "--vocab-size", "320", "--out", out, "--workers", "1"]) == 0
    pretrain(replace(config, steps=1, data=replace(config.data, path=out)))
    rows = held_out(HeldOutConfig(checkpoint=str(tmp_path / "run")))
    assert rows[0]["source"] == "a"
    named = held_out(HeldOutConfig(checkpoint=str(tmp_path / "run"), sources=(f"set={out}",)))
    assert named[0]["source"] == "set/a"
    assert named[0]["nats a token"] == rows[0]["nats a token"]
    with pytest.raises(ValueError, match="is encoded with another vocabulary"):
        held_out(HeldOutConfig(checkpoint=str(run), sources=(f"set={out}",)))


def test_head_cuts_the_last_line():
    lines = [np.arange(5), np.arange(1), np.arange(9), np.arange(3)]
    assert [len(line) for line in head(lines, 6)] == [5, 3]
    assert [len(line) for line in head(lines, 4)] == [5]


def test_mistakes(run):
    with pytest.raises(ValueError, match="write NAME=PATH"):
        held_out(HeldOutConfig(checkpoint=str(run), sources=("notes",)))
    with pytest.raises(ValueError, match="holds no text of its own: name some with --sources"):
        held_out(HeldOutConfig(checkpoint=str(run / "model")))
    with pytest.raises(ValueError, match="context is 0"):
        HeldOutConfig(checkpoint="x", context=0)
