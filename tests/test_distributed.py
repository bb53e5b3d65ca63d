"""Several gloo processes give the noiseless trajectory of one, noise is added exactly once, and bytes are counted.

The ranks run tests/distributed_worker.py. WORLD_SIZES=4 pytest tests/test_distributed.py runs the same on four processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import distributed_worker as worker
import pytest
import torch

ROOT = Path(__file__).parent.parent
PROCESSES = int(os.environ.get("WORLD_SIZES", 2))


def launch(folder, *cases, processes=PROCESSES):
    """{case: [what each rank returned]}"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += [str(ROOT / "tests" / "distributed_worker.py"), str(folder), *cases]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-6000:]
    return {case: [torch.load(folder / f"{case}.{r}.pt") for r in range(processes)] for case in cases}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("ddp"), *(case for case in worker.CASES if case.startswith("ddp")))


def assert_same_trajectory(ranks, one, tolerance=1e-5):
    """Every step's gradient, all parameters together; the ranks agree bit for bit."""
    assert one["steps"] == len(one["gradients"]) == len(ranks[0]["gradients"]) > 0
    for rank in ranks:
        assert rank["steps"] == one["steps"]
        for mine, first, alone in zip(rank["gradients"], ranks[0]["gradients"], one["gradients"], strict=True):
            assert torch.equal(mine, first)
            assert float((mine - alone).norm()) <= tolerance * float(alone.norm())


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize("what", ["full", "lora"])
def test_noiseless_trajectory_of_ddp_is_that_of_one_process(tmp_path, ddp, what, mode):
    case = f"ddp-{what}-{mode}"
    one = worker.run(case, tmp_path)
    assert_same_trajectory(ddp[case], one)
    counts = torch.tensor([rank["counts"] for rank in ddp[case]])
    assert all(rank["wrapped"] == "DistributedDataParallel" and rank["world"] == PROCESSES for rank in ddp[case])
    assert counts.sum(0).tolist() == one["counts"]
    assert one["counts"] == [2, 5, 2, 1, 0]


def test_ddp_adds_noise_once_and_shares_it(ddp):
    """Its standard deviation is σC/B, not √2 of it."""
    ranks = ddp["ddp-noise"]
    for step, (mine, first) in enumerate(zip(ranks[-1]["gradients"], ranks[0]["gradients"], strict=True)):
        assert torch.equal(mine, first), step
        assert float(mine.std()) == pytest.approx(2000 * 1e-3 / 12, rel=0.01)
    a, b = ranks[0]["gradients"]
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / len(a) ** 0.5
