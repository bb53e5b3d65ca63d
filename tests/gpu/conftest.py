"""These tests run wherever CUDA is. Without it ``DP_TEST_DEVICE=simulated pytest tests/gpu`` runs them on a device that
is simulated on the CPU (tests/simulated_device.py), and ``DP_TEST_DEVICE=cpu`` on the CPU itself."""

import os
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

DEVICE = os.environ.get("DP_TEST_DEVICE", "cuda")
if DEVICE == "simulated":
    import simulated_device

    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE


@pytest.fixture
def device():
    return torch.device(DEVICE)


@contextmanager
def _waits():
    """What the library makes the program wait for inside: a Counter of functions, filled at the end."""
    found = Counter()
    if DEVICE == "simulated":
        with simulated_device.Synchronisations() as met:
            yield found
        for name, number in met.found.items():
            if name.startswith("dp_transformers."):
                found[name.partition(":")[0]] += number
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            yield found
            torch.cuda.set_sync_debug_mode("default")
        for each in caught:
            if "synchroniz" in str(each.message) and "dp_transformers" in each.filename:
                found[os.path.basename(each.filename)] += 1


@pytest.fixture
def waits():
    if DEVICE == "cpu":
        pytest.skip("nothing waits for the CPU")
    return _waits
