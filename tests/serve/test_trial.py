"""Drafts as recorded steps verify and commit them, with the card's KDA kernels run by Python on a CPU."""

import pytest
import torch

pytest.importorskip("triton")

from rille.model.model import new_model
from rille.ops.kda import decode_launch
from rille.serve.engine import Engine
from tests.ops.test_kda_decode_gluon import kernels
from tests.serve.test_graphs import compare_drafts, with_drafts
from tests.train.small import MODEL

__all__ = ["kernels"]  # a fixture


@pytest.mark.usefixtures("kernels")
def test_the_kernels_write_what_plain_steps_write(monkeypatch):
    """bf16, and both turns; steps of five tokens a row, then a commit of none."""
    model = new_model(MODEL.replace(init_std=0.2, num_experts=2), dtype=torch.bfloat16, seed=1)
    verify, tokens = decode_launch.verify, set()

    def seen(inputs, *rest):
        tokens.add(inputs.qkv.shape[1])
        return verify(inputs, *rest)

    monkeypatch.setattr(decode_launch, "verify", seen)
    served = with_drafts(model, sizes=range(1, 9), captures=False)
    plain = Engine(model, num_pages=200, hash_unit=64)
    agreed = compare_drafts((5, 63, 70, 31), 12, served, plain)
    assert sum(agreed) > 90 and tokens == {0, 5}, agreed
