"""The tests that need a GPU (tests/gpu) run on a device that is simulated on the CPU, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.halved

ROOT = Path(__file__).parent.parent


def run(code_or_tests, **environment):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment}
    return subprocess.run([sys.executable, *code_or_tests], cwd=ROOT, env=env, capture_output=True, text=True)


def test_what_needs_a_gpu_passes_on_a_simulated_one(request):
    whole = ["--whole-tables"] * request.config.getoption("--whole-tables")
    result = run(["-m", "pytest", "-p", "no:cacheprovider", "tests/gpu", *whole], DP_TEST_DEVICE="simulated")
    assert result.returncode == 0, result.stdout[-5000:]
    assert "passed" in result.stdout or "[100%]" in result.stdout


MIXED = """
import torch, simulated_device as simulated
x, on_cpu = torch.randn(4, 3).to("simulated"), torch.randn(3)
layer = torch.nn.Linear(3, 2).to("simulated")
refused = []
for mix in (lambda: x + on_cpu, lambda: layer(on_cpu), lambda: torch.cat([x, on_cpu[None]]), lambda: x.numpy()):
    try:
        mix()
    except (RuntimeError, TypeError):
        refused.append(mix)
assert len(refused) == 4
assert x.device.type == "simulated" and (x + 1).sum().device == x.device and type(layer.weight) is torch.nn.Parameter
with simulated.Synchronisations() as seen:
    y = layer(x).relu().sum()
    y.backward()
    layer.weight.data.mul_(2.0), x[:, torch.arange(2, device=x.device)], x.clone().masked_fill_(x > 0, 1.0)
assert not seen.found, seen.found
waiting = [
    lambda: float(y), lambda: x.tolist(), lambda: x.cpu(), lambda: x[x > 0], lambda: x.nonzero(), lambda: bool(y > 0),
    lambda: torch.equal(x, x), lambda: x.unique(), lambda: on_cpu.to(x.device), lambda: torch.tensor([1.0], device=x.device),
    lambda: x.clone().__setitem__(x > 0, x[:, 0].repeat(3)[: (x > 0).sum()]),
]
for wait in waiting:
    with simulated.Synchronisations() as seen:
        wait()
    assert seen.found.total() >= 1, wait
"""


def test_the_simulated_device_refuses_and_waits_as_a_gpu_does():
    result = run(["-c", MIXED])
    assert result.returncode == 0, result.stderr[-3000:]
