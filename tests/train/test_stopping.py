"""Signals: the first is a wish, the second ends, and the handlers of before come back."""

import os
import signal
import threading

import pytest

from rille.train.stopping import Stop, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


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
