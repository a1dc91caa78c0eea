"""Settings of property tests, and the tests that need PyTorch.

`make test` draws the same 10 examples every time, `make test-all` the same 40, so that it shows what a change
broke and nothing else; `make nightly` draws 40 new ones. HYPOTHESIS_PROFILE=deep draws 3000: for selected
tests, after a change to the core. A test states a number of its own only if its examples are expensive. There
is no deadline per example: the duration depends on the world that is drawn, and machines are shared.

Kernels run in Triton's interpreter, which must be chosen before the first import of Triton.
"""

import gc
import os
import signal
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.drawn import DRAW, keep_quick, keep_sampled

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
AS_FOUND = [phase for phase in Phase if phase is not Phase.shrink]  # shrinking takes minutes
settings.register_profile("same", patient, derandomize=True, phases=AS_FOUND, max_examples=10)
settings.register_profile("more", settings.get_profile("same"), max_examples=40)
settings.register_profile("new", patient, derandomize=False, print_blob=True, max_examples=40)
settings.register_profile("deep", settings.get_profile("new"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
NEED_TORCH = ["kernels", "realengine", "experiments/calibrate/engine", "experiments/validate/engine"]
collect_ignore = NEED_TORCH if MISSING else []
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Collects garbage as rarely as a command; hears Ctrl-C; declares xdist_group without pytest-xdist.

    A shell makes its background jobs ignore Ctrl-C, as would every process that a test starts and interrupts.
    """
    gc.set_threshold(50_000)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "xdist_group(name): tests that share what is costly, on one worker")
    config.addinivalue_line("markers", "sampled(fast, slow): how many of the cases are run (tests.drawn)")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not drawn, and moves slow tests to the front: no worker is left alone with one."""
    keep_sampled(config, items)
    keep_quick(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Takes what the collection has made out of the garbage collector's sight.

    A million objects of ten thousand tests would be walked each time that an engine collects garbage: 0.7 s.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Returns the lines of the header: the draw, the folders left out and the packages that are missing."""
    lines = [f"cases of slow tests: TESTS_DRAWN={DRAW} (all: every case)"]
    if MISSING:
        left_out = ", ".join(f"tests/{folder}" for folder in collect_ignore)
        lines.append(f"not run: {left_out}: {' and '.join(MISSING)} not installed")
    return lines
