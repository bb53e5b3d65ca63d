"""Tests run on one thread (two-core machines, tiny models), offline, and never touch the global random state of
another test."""

import gc
import hashlib
import json
import logging
import math
import os
import random
import secrets
import subprocess
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from model_table import ModelTable

from dp_transformers.clipping import precision
from dp_transformers.mechanism.accounting import accountants
from dp_transformers.mechanism.sampling import DrawSampler

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


@pytest.fixture
def drawn(monkeypatch):
    """The draws of the trainings in a test, as they come."""
    draws, draw = [], DrawSampler.draw

    def noted(sampler):
        draws.append(draw(sampler))
        return draws[-1]

    monkeypatch.setattr(DrawSampler, "draw", noted)
    return draws


ROOT, DURATIONS = Path(__file__).parent.parent, Path(__file__).with_name("durations.json")
PART, OF = "DP_TEST_PART", 9  # which part of the cases is run, and that it is a ninth of them


def pytest_configure(config):
    """Fix which part of the cases is run, for the processes of pytest-xdist too, and let them take the files in the
    order in which they were sorted."""
    config.option.loadscopereorder = False
    os.environ.setdefault(PART, _commit())
    config.pluginmanager.register(Durations(config))


def _commit() -> str:
    """What is checked out; nothing, and so always the same part, where git does not say."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def pytest_report_header(config):
    whole = any(map(config.getoption, ("--whole-tables", "--write-tables")))
    return "cases: all" if whole else f"cases: a ninth of each test's, chosen by {PART}={os.environ[PART]}"


@pytest.hookimpl(trylast=True)  # of what -k and -m choose
def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available() and "DP_TEST_DEVICE" not in os.environ:
        why = "no CUDA device; DP_TEST_DEVICE=simulated runs it on one that is simulated"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=why))
    if not any(map(config.getoption, ("--whole-tables", "--write-tables"))):
        _leave_out_of_tables(config, items)
    recorded = json.loads(DURATIONS.read_text())
    # the longest first, so that two processes end together
    items.sort(key=lambda item: -recorded.get(item.nodeid.partition("::")[0], math.inf))


def _leave_out_of_tables(config, items):
    """Run a ninth of the cases of each test, rounded up: other ones for another commit. Tests of a file that are marked
    as one table share that ninth, or whatever part the mark says, and those that are marked as whole are run in all
    cases. Of a file that is marked as halved, half of what is then left is run."""
    tables, halves, parts = defaultdict(list), defaultdict(list), {}
    for item in items:
        if not item.get_closest_marker("whole"):
            mark = item.get_closest_marker("table")
            table = item.path, mark.args if mark and mark.args else item.originalname
            tables[table].append(item)
            parts[table] = mark.kwargs.get("of", OF) if mark else OF
    left = set()
    for table, cases in tables.items():
        number = math.ceil(len(cases) / parts[table])
        left.update(_shuffled(cases, "table")[number:])
        if any(item.get_closest_marker("halved") for item in cases):
            halves[cases[0].path] += _shuffled(cases, "table")[:number]
    for cases in halves.values():
        left.update(_shuffled(cases, "half")[math.ceil(len(cases) / 2) :])
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _shuffled(cases, what):
    """In an order that the commit chooses."""
    return sorted(cases, key=lambda item: hashlib.sha256(f"{os.environ[PART]} {what} {item.nodeid}".encode()).digest())


class Durations:
    """CPU seconds of each file's tests and what they start, which other work on the machine hardly changes; with
    --write-durations those of the files that were run are recorded."""

    def __init__(self, config):
        self.writes = config.getoption("--write-durations") and not hasattr(config, "workerinput")
        self.seconds = defaultdict(float)

    def pytest_runtestloop(self):
        self.before = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = sum(os.times()[:4])
        report.cpu, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += getattr(report, "cpu", 0.0)  # none of a process that died

    def pytest_sessionfinish(self):
        if self.writes:
            seconds = json.loads(DURATIONS.read_text()) | {name: round(s, 1) for name, s in self.seconds.items()}
            kept = {name: s for name, s in sorted(seconds.items()) if (ROOT / name).exists()}
            DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def pytest_collection_finish():
    """What is imported by now stays, and no collection of garbage has to look through it."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--write-tables", action="store_true", help="write docs/*.md from what these tests measure")
    parser.addoption("--write-durations", action="store_true", help="record the seconds of each file that is run")
    parser.addoption("--whole-tables", action="store_true", help="run all cases of all tests")


@pytest.fixture(scope="session")
def model_table(request):
    table = ModelTable()
    yield table
    if request.config.getoption("--write-tables"):
        table.write()
