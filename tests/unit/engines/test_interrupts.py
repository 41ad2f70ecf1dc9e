"""A signal that ends a program is an interrupt while a run lasts, unless somebody has it ignored or handled; what
follows it does not interrupt the end of the run."""

import signal
from concurrent.futures import ThreadPoolExecutor
from math import inf

import pytest

from pytest_slmserve.engines import interrupts
from pytest_slmserve.engines.interrupts import ENDINGS, as_interrupts, held, hurried


@pytest.fixture(autouse=True)
def as_a_shell_has_them(monkeypatch):
    monkeypatch.setattr(interrupts, "HANDLER", interrupts.Interrupts())  # whatever run this is part of
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(each) for each in ENDINGS]


@pytest.mark.parametrize("number", ENDINGS)
def test_signal_interrupts_run(number, monkeypatch):
    monkeypatch.setattr(interrupts, "BURST_S", 0.0)
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        signal.raise_signal(number)
    assert handlers() == [signal.SIG_DFL] * 3
    with as_interrupts():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", ENDINGS)
def test_second_signal_hurries_end(number, monkeypatch):
    signal.signal(number, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        try:
            signal.raise_signal(number)
        finally:
            assert not hurried()
            for each in ENDINGS:
                signal.raise_signal(each)
            assert hurried()
    signal.raise_signal(number)  # a run that was interrupted mostly ends its process, too
    monkeypatch.setattr(interrupts, "BURST_S", -inf)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.default_int_handler
    with as_interrupts():
        assert not hurried(), "that was another run"


def test_held_signal_waits():
    done = []
    with as_interrupts():
        with pytest.raises(KeyboardInterrupt), held():
            with held():
                signal.raise_signal(signal.SIGTERM)
                assert not hurried()
                signal.raise_signal(signal.SIGTERM)
                done.append(hurried())
            done.append("still held")
        with held():
            done.append("held again")
    assert done == [True, "still held", "held again"]
    with as_interrupts():
        with as_interrupts():
            pass
        assert handlers() == [interrupts.HANDLER] * 3
    assert handlers() == [signal.SIG_DFL] * 3

    def inside():
        with as_interrupts(), held():
            return handlers()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == [signal.SIG_DFL] * 3
    assert not interrupts.HANDLER.held


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_foreign_signal_handler_stays(handler):
    signal.signal(signal.SIGHUP, handler)
    with as_interrupts():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is handler
        assert signal.getsignal(signal.SIGTERM) is interrupts.HANDLER
    assert signal.getsignal(signal.SIGHUP) is handler
