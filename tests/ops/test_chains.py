"""When kernels may begin before the ones ahead of them have ended."""

from threading import Thread

import pytest
import torch

from rille.ops.chains import chain, is_chain

launching = pytest.importorskip("rille.ops.launching", exc_type=ImportError)


def test_only_inside_and_only_if_wanted():
    assert not is_chain()
    with chain(False):
        assert not is_chain()
        with chain():
            assert is_chain()
        assert not is_chain()
    with pytest.raises(KeyError), chain(), chain():
        raise KeyError
    assert not is_chain()


def test_other_threads_are_not_meant():
    seen = []
    with chain():
        thread = Thread(target=lambda: seen.append(is_chain()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_options_of_a_kernel(monkeypatch):
    x = torch.zeros(1)
    with chain():
        assert launching.chained(x) == {"CHAINED": False}, "there is no such card here"
        monkeypatch.setattr(launching, "INTERPRET", False)
        monkeypatch.setattr(launching, "takes_chains", lambda device: True)
        assert launching.chained(x) == {"CHAINED": True, "launch_pdl": True}
        assert launching.chained(x, joins=True) == {"CHAINED": True}
    assert launching.chained(x) == {"CHAINED": False}
