"""Tests run on one thread (two-core machines, tiny models), offline, and never touch the global random state of
another test."""

import gc
import logging
import os
import random
import secrets
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from model_table import ModelTable

from dp_transformers.clipping import precision
from dp_transformers.mechanism.accounting import accountants

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """The keys that draws and noise begin from without a ``dp_seed`` are the same in every run of a test too."""
    torch.manual_seed(0)
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture(autouse=True)
def _log_levels():
    """What a command, a recipe or a benchmark that runs in this process says to log is said for no other test."""
    loggers = [logging.getLogger(name) for name in ("dp_transformers", "transformers")]
    levels, disabled = [logger.level for logger in loggers], logging.root.manager.disable
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.disable(disabled)


@pytest.fixture(autouse=True)
def _known_accountants(monkeypatch):
    """An accountant that a test, or an example in a docstring, registers is known to no other test."""
    monkeypatch.setattr(accountants, "_KNOWN", dict(accountants._KNOWN))


@pytest.fixture(autouse=True, scope="session")
def _key_of_data_digests(tmp_path_factory):
    """Tests make a key of their own, not one in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(params=[False, True], ids=["products in fp32", "products in bf16"])
def bf16_products(request, monkeypatch):
    """Whether this CPU multiplies bf16 faster, as it is told: without AMX it rounds nothing then, and sums are still formed of
    two products."""
    monkeypatch.setattr(precision, "_cpu_multiplies_bf16", lambda: request.param)
    return request.param


def pytest_configure(config):
    """Processes of pytest-xdist take the files as they come: with its order, those of few tests last, one process would
    wait at the end while the other runs the few long ones."""
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)  # of what -k and -m choose
def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available() and "DP_TEST_DEVICE" not in os.environ:
        why = "no CUDA device; DP_TEST_DEVICE=simulated runs it on one that is simulated"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=why))
    if not any(map(config.getoption, ("--whole-tables", "--write-tables"))):
        _leave_out_of_tables(config, items)


def _leave_out_of_tables(config, items):
    """Run a ninth of the cases of the tests that are marked as a table, the first one and others as their names fall."""
    seen, kept, left = set(), [], []
    for item in items:
        test = (item.parent, item.originalname)
        is_left = item.get_closest_marker("table") and test in seen and zlib.crc32(item.name.encode()) % 9
        seen.add(test)
        (left if is_left else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish():
    """What is imported by now stays, and no collection of garbage has to look through it."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--write-tables", action="store_true", help="write docs/*.md from what these tests measure")
    parser.addoption("--whole-tables", action="store_true", help="run all cases of tests that are marked as a table")


@pytest.fixture(scope="session")
def model_table(request):
    table = ModelTable()
    yield table
    if request.config.getoption("--write-tables"):
        table.write()
