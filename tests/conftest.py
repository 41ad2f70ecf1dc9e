"""Its being here puts this folder on the path: a test writes `from strategies import measurement`."""

import gc
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from real_engine import vllm_here  # noqa: F401 - a fixture for tests/engines and tests/real
from simulated_sessions import opened  # noqa: F401

# pytest reads this file for whatever runs in the checkout, where only the package may be installed.
with suppress(ImportError):
    from hypothesis import settings

    # A busy machine is no finding, so there is no deadline. `tox -e coverage` tries four times as many examples.
    settings.register_profile("tests", deadline=None, max_examples=50)
    settings.register_profile("thorough", deadline=None, max_examples=200)
    settings.load_profile("tests")


# What a shell starts in the background ignores SIGINT, and behind nohup SIGHUP; so would all that a test starts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def wide_terminal() -> Iterator[None]:
    """Texts are the same wherever the tests run, those of a module's own run too, and tables have all their columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "150")
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is collected stays to the end, so the garbage collector leaves it out: it would look at it over and over."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """tox runs those that want to be alone by themselves; of some files there are none, which is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr == "alone":
        session.exitstatus = pytest.ExitCode.OK
