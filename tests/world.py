"""Processes that train together (gloo), forked for each case from one process that has paid for the imports.

A case is a function of a module here, called as f(folder, **options) on each rank. Each case has processes of its own,
so that none begins with what another one left behind, and which cases are run, and in which order, changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = timedelta(seconds=300)  # until a rank that waits for another one gives up


class World:
    """``ranks`` processes at a time. The process that they are forked from is started by the first case."""

    def __init__(self, module: str, folder: Path, ranks: int = 2):
        self.module, self.folder, self.ranks = module, folder, ranks
        self._server: subprocess.Popen | None = None

    def run(self, function: str, name: str, **options: Any) -> list[Any]:
        """What the function returned on each rank; the case writes to ``folder``/``name``."""
        server = self._started()
        job = {"function": function, "name": name, "options": options}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        ends = json.loads(server.stdout.readline() or "[]")
        assert ends == [0] * self.ranks, f"{name} ended with {ends}\n" + self._log.read_text()[-6000:]
        return [torch.load(_result(self.folder, name, rank), weights_only=False) for rank in range(self.ranks)]

    def _started(self) -> subprocess.Popen:
        if self._server is None:
            self._log = self.folder / "log"
            paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
            env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, self.module, str(self.folder), str(self.ranks)]
            with open(self._log, "w") as log:
                self._server = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
                )
        return self._server

    def end(self) -> None:
        if self._server is not None:
            self._server.communicate()


def _result(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.pt"


def serve(module: str, folder: Path, ranks: int) -> None:
    """Run a case for each line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        functions = importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        processes = [fork(functions, folder, job, rank, ranks) for rank in range(ranks)]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]), flush=True)


def fork(functions: Any, folder: Path, job: dict[str, Any], rank: int, ranks: int) -> int:
    """The process of a rank, started."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        sys.stdout = sys.stderr
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        store = f"file://{folder / job['name']}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=PATIENCE)
        found = getattr(functions, job["function"])(folder / job["name"], **job["options"])
        torch.save(found, _result(folder, job["name"], rank))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
