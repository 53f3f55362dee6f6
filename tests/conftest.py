"""What every test runs under: one thread, the Triton interpreter where there is no GPU, and fresh memory full of NaN,
so that a read before the first write shows."""

import os
import signal
import sys
from pathlib import Path

# Read when the libraries are loaded, so set before torch and Triton are.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET could be set"
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts a job in the background lets it ignore Ctrl-C, and every process below it; tests send that signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
POISONED = ("ops", "model")
POISON = 0xFF  # in every byte: NaN in each float format, 255 in uint8, -1 in the signed integers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with the poison, in place."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.device.type != "meta":
        tensor.untyped_storage().fill_(POISON)
    return tensor


def poisoning(make):
    """Wrap a function that returns uninitialised memory: what the library asks for comes poisoned."""

    def poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(tensor) if caller.partition(".")[0] == "rille" else tensor

    return poisoned


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin hand out NaN (integers: all bits set) to callers inside rille."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoning(getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def poison_where_kernels_write(request: pytest.FixtureRequest) -> None:
    if request.path.relative_to(TESTS).parts[0] in POISONED:
        request.getfixturevalue("poisoned_memory")
