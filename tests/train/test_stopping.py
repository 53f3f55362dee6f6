"""Signals: the first is a wish, the second ends, and the handlers of before come back."""

import os
import signal
import threading
from time import monotonic

import pytest

from rille.train.stopping import Interrupted, Stop, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_time_that_is_over_is_a_wish():
    assert not Stop().wanted
    assert not Stop(deadline=monotonic() + 1000).wanted
    assert Stop(deadline=monotonic()).wanted
    assert "its time is over, after step 7; a checkpoint is saved" in str(stopped := Interrupted(7, Stop(deadline=0.0)))
    assert stopped.exit_code == 0


def test_the_second_ends():
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_gets_no_signals():
    got: list[Stop] = []

    def inside():
        with stop_on_signals() as stop:
            got.append(stop)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert got[0].signal is None
