"""Two processes, each on a device of its own, train as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).with_name("two_devices.py")


def run(folder, device, *launcher):
    env = {**os.environ, "PYTHONPATH": str(WORKER.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(WORKER), device.type, str(folder / "weights")]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(path) for path in sorted(folder.iterdir())]


def test_two_devices_train_as_one(device, tmp_path):
    if device.type != "cpu" and (device.type != "cuda" or torch.cuda.device_count() < 2):
        pytest.skip("needs two CUDA devices (or DP_TEST_DEVICE=cpu, which stands for as many as there are processes)")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (alone,) = run(folders[0], device)
    ranks = run(folders[1], device, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    for weights in ranks:
        for a, b in zip(weights, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
