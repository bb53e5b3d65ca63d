"""Two gloo processes give the noiseless trajectory of one; noise is added once and is the same on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

JOB = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}]
import test_trainer as t
from dp_transformers import DPTrainer, distributed
options = json.loads(sys.argv[1])
model, grads = t.build(options.pop("model")), t.Grads()
args = t.arguments(options.pop("folder"), **options)
trainer = DPTrainer(model, args, t.collate, t.dataset(), callbacks=[grads])
trainer.train()
flat = lambda step: torch.cat([g.flatten() for g in step])
digest = [[float(flat(s).double().norm()), float((flat(s).double() * torch.arange(flat(s).numel()).cos()).sum())] for s in grads.steps]
with open(args.output_dir + f"/rank{{distributed.rank()}}.json", "w") as file:
    json.dump({{"world": distributed.world_size(), "steps": trainer.privacy_spent().steps, "grads": digest,
               "first": flat(grads.steps[0])[:20000].tolist()}}, file)
"""


def launch(folder, processes, **options):
    folder.mkdir()
    job = folder / "job.py"
    job.write_text(JOB.format(tests=str(ROOT / "tests")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), str(job)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, json.dumps({"folder": str(folder), **options})], env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(processes)]
    assert all(r["world"] == processes for r in ranks)
    return ranks


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_noiseless_trajectory_of_two_processes_is_that_of_one(tmp_path, mode):
    """Uneven shares and empty ranks included: 3 examples expected in a step."""
    options = {"model": "bert", "noise_multiplier": 0.0, "dp_seed": 3, "expected_batch_size": 3, "max_steps": 8, "clipping_mode": mode}
    one = launch(tmp_path / "one", 1, **options)[0]
    two = launch(tmp_path / "two", 2, **options)
    assert two[0]["grads"] == two[1]["grads"]
    for a, b in zip(one["grads"], two[0]["grads"], strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5)
    assert one["steps"] == two[0]["steps"] == 8


def test_noise_is_added_once_and_shared(tmp_path):
    """With a bound so small that gradients vanish beside the noise of σ = 2: its standard deviation is σC/B, not √2 of it."""
    ranks = launch(tmp_path / "noise", 2, model="bert", noise_multiplier=2000.0, max_grad_norm=1e-3, expected_batch_size=12, max_steps=2)
    assert ranks[0]["first"] == ranks[1]["first"]
    values = ranks[0]["first"]
    std = (sum(v * v for v in values) / len(values)) ** 0.5
    assert std == pytest.approx(2000 * 1e-3 / 12, rel=0.03)
    assert (tmp_path / "noise" / "privacy_ledger.jsonl").read_text().count('"step"') == 2
