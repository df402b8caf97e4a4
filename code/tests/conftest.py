"""How the tests share the cores, and how many examples hypothesis draws."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with two, tiny tensors run many times slower

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "examples"), str(TESTS)]
torch.set_num_threads(1)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=40, deadline=None, suppress_health_check=SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=SLOW)
settings.load_profile("ci")

# A file stays on one core, where what its tests share is made once; the longest come first. The
# tests of these share nothing: they are dealt out singly at the end, so that no core waits long.
LONG = (
    "test_compile",
    "test_script",
    "test_planted_faults",
    "test_checkpoints",
    "test_after_2025",
)
SINGLE = ("test_practice",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """How the tests are shared out with -n."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415, there only with -n

    class FilesThenTests(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if Path(file).stem in SINGLE else file

    config.option.loadscopereorder = False
    return FilesThenTests(config, log)


def pytest_collection_modifyitems(items):
    order = {name: place - len(LONG) for place, name in enumerate(LONG)} | dict.fromkeys(SINGLE, 1)
    items.sort(key=lambda item: order.get(item.path.stem, 0))


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_finish():
    gc.freeze()  # every later collection would walk the millions of objects of the imports
