"""What a device has to spare, as its allocator, Linux and control groups say it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dp_transformers.clipping import measured_budget
from dp_transformers.clipping.measured_budget import DeviceMemory

GB = 2**30


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 20 + 9 - 7), (0.25, 20 - 7)])
def test_of_an_allocator(fraction, free, monkeypatch):
    """Free is what the driver has left, or the process may still take, and what the allocator holds in reserve, with
    the highest in use."""
    allocator = SimpleNamespace(
        mem_get_info=lambda device: (20 * GB, 80 * GB),
        memory_reserved=lambda device: 9 * GB,
        max_memory_allocated=lambda device: 7 * GB,
        get_per_process_memory_fraction=lambda device: fraction,
    )
    monkeypatch.setattr(torch, "get_device_module", {torch.device("cuda", 1): allocator}.__getitem__)
    assert DeviceMemory.of(torch.device("cuda", 1)) == DeviceMemory(7 * GB, free * GB)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files as Linux shows them: a process of 2 GB that once had 3, on a machine with 16 GB left."""
    monkeypatch.setattr(measured_budget, "PROC", tmp_path / "proc")
    monkeypatch.setattr(measured_budget, "CGROUPS", tmp_path / "cgroups")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal:       {2**25} kB\nMemAvailable:   {2**24} kB\nHugePages_Total:       0\n")
    write("proc/self/status", f"Name:\tpython\nVmHWM:\t {3 * 2**20} kB\nVmRSS:\t {2 * 2**20} kB\nThreads:\t1\n")
    write("proc/self/cgroup", "0::/\n")
    return write


CPU = torch.device("cpu")


def test_of_the_process(machine):
    assert DeviceMemory.of(CPU) == DeviceMemory(3 * GB, 15 * GB)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_processes_of_one_launch_divide_what_there_is(machine, name, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv(name, "4")
    assert DeviceMemory.of(CPU).free == 3 * GB


def test_the_tightest_control_group_counts_and_its_cached_files_make_room(machine):
    machine("proc/self/cgroup", "3:cpuset:/\n0::/user/job\n")
    for group, most in (("", "max"), ("user/", str(10 * GB)), ("user/job/", str(30 * GB))):
        machine(f"cgroups/{group}memory.max", f"{most}\n")
        machine(f"cgroups/{group}memory.current", f"{7 * GB}\n")
        machine(f"cgroups/{group}memory.stat", f"anon 5\ninactive_file {2 * GB}\nactive_file 9\n")
    assert DeviceMemory.of(CPU).free == (10 - 7 + 2 - 1) * GB


REAL = """
import json, torch
from dp_transformers.clipping.measured_budget import DeviceMemory
read = lambda: DeviceMemory.of(torch.device("cpu"))
before = read()
block = torch.ones(75_000_000)
during = read()
del block
after = read()
print(json.dumps([x.highest for x in (before, during, after)]))
"""


def test_the_highest_of_a_real_process_stays():
    result = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    before, during, after = json.loads(result.stdout)
    assert min(during, after) - before > 2.9e8  # Linux counts pages late
