"""How the tests share the cores, and how many examples hypothesis draws."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with two, tiny tensors run many times slower

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=40, deadline=None, suppress_health_check=SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=SLOW)
settings.load_profile("ci")

# These files take longest, so they come first and the cores finish together.
LONG = ("test_compile", "test_checkpoints", "test_script", "test_planted_faults")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n a file stays on one core: what its tests share is made once."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415, there only with -n

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    gc.freeze()  # every later collection would walk the millions of objects of the imports
