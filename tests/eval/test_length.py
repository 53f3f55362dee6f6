"""Loss by position: buckets cover every position once, all on the same documents."""

import numpy as np
import pytest

from rille.eval.config import LengthConfig
from rille.eval.length import beyond, by_bucket, edges, length


@pytest.mark.parametrize("size", [2, 64, 65, 128, 1000, 4096])
def test_buckets_cover_all(size):
    borders = edges(size)
    assert borders[0] == 0
    assert borders[-1] == size
    assert all(a < b for a, b in zip(borders[:-1], borders[1:], strict=True))


def test_means_of_buckets():
    nats = np.tile(np.arange(200.0), (3, 1)) + np.array([[-1.0], [0.0], [1.0]])
    rows = by_bucket(nats, trained=128)
    assert [(row["from"], row["to"]) for row in rows] == [(0, 63), (64, 127), (128, 199)]
    assert [row["nats a token"].mean for row in rows] == pytest.approx([31.5, 95.5, 163.5])
    assert [row["seen in training"] for row in rows] == [True, True, False]
    assert "68 ± 0 nats" in beyond(nats, 128)  # 163.5 - 95.5, the same in every document
    assert "above 0" in beyond(nats, 128)
    assert "not told apart" in beyond(np.ones((3, 200)), 128)


def test_a_run(run, tmp_path, capsys):
    rows = length(LengthConfig(checkpoint=str(run), length=70, out=str(tmp_path)))
    assert [row["to"] for row in rows] == [63, 69]
    assert "beyond the 48 tokens of a training sequence" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "length.png").exists()
    with pytest.raises(ValueError, match="no document has 100,000 tokens, the longest"):
        length(LengthConfig(checkpoint=str(run), length=100_000))
