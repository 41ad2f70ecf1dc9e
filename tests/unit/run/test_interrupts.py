"""A signal that ends a program is an interrupt while a run lasts, unless somebody has it ignored or handled."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_slmserve.run.interrupts import ENDINGS, as_interrupts


@pytest.fixture(autouse=True)
def as_a_shell_has_them():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_is_an_interrupt_and_afterwards_what_it_was(number):
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        signal.raise_signal(number)
    assert [signal.getsignal(each) for each in ENDINGS] == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_what_is_ignored_or_handled_stays_so(handler):
    signal.signal(signal.SIGHUP, handler)
    with as_interrupts():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is handler
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is handler


def test_another_thread_takes_no_signals():
    def inside():
        with as_interrupts():
            return [signal.getsignal(each) for each in ENDINGS]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == [signal.SIG_DFL, signal.SIG_DFL]
