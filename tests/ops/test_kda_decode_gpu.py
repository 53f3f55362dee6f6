"""The kernels of decode and verify on a card, by the gate of their benchmark: against the slow twin, verify against
single steps bit for bit, and a graph that is replayed with other slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "ops"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    from kda_parts import decode

    return decode


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("K128 V128", torch.float32),
        ("K128 V128", torch.bfloat16),
        ("K128 V256", torch.bfloat16),
        ("softplus", torch.bfloat16),
    ],
)
def test_decode_verify_and_commit(gate: Any, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = gate.check_case(name, gate.GATE_CASES[name], dtype, "gluon")
    assert len(rows) == 8 and not [row for row in rows if not row[1] <= row[2]]


def test_a_graph_follows_its_slots(gate: Any) -> None:
    torch.manual_seed(0)
    what, error, limit = gate.check_graph()
    assert error <= limit, what
