"""Killed with SIGKILL anywhere and resumed: the ledger covers all noise ever drawn, no noise comes twice, be it
correlated over steps or not, and no half-written checkpoint is loaded.

`python -m pytest tests/test_resume.py` kills some thirty times; `KILLS=200 python -m pytest -s tests/test_resume.py` at
that many random places, of one process and as many of two, plain and sharded; again with correlated noise.

A life is one output_dir: training that is killed and resumed, killed and resumed, until it is left to end. Each
attempt is a fork of one process that has paid for the imports (this file as a script), or one for each rank. Each rank
keeps a journal, flushed line by line, of what really happened: the hash of each noise vector, of what went into each
checkpoint and of what came out, each epsilon reported.
"""

import contextlib
import errno
import functools
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from world import World

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine, compute_epsilon
from dp_transformers.clipping.parallel.dtensor import to_local
from dp_transformers.mechanism.accounting.events import phases_epsilon
from dp_transformers.mechanism.clipping_functions import FlatClipping
from dp_transformers.mechanism.mechanism import Mechanism
from dp_transformers.mechanism.noise import BandedInverseNoise, BandedNoise
from dp_transformers.mechanism.sampling import CyclicPoissonSampling, FixedOrderSampling
from dp_transformers.noise.generators import Dither, GaussianNoise
from dp_transformers.noise.streams import CorrelatedStream
from dp_transformers.runtime import distributed
from dp_transformers.step import checkpoint
from dp_transformers.step.checkpoint import STATE_NAME, PrivacyState
from dp_transformers.step.ledger import Ledger, PrivacyStateError
from dp_transformers.step.step import PrivateStep

TARGET, DELTA, STEPS, ACCOUNTANT = 6.0, 1e-3, 16, "rdp"
WITH_LOSS = 1.01**-0.5  # σ of gradients and the logged loss together, over that of the gradients
CORRELATED = {  # (mechanism, in how many steps that follow each other an independent number takes part when it is drawn)
    name: (Mechanism(sampling=sampling, clipping=FlatClipping(1.0), noise=noise, steps=STEPS), draws)
    for name, sampling, noise, draws in (
        ("banded", CyclicPoissonSampling(40, 8, 3), BandedNoise(1.3, (0.8, 0.5, 0.33)), 1),
        ("regenerated", FixedOrderSampling(40, 8), BandedInverseNoise(1.3, (1.0, -0.5, -0.125)), 3),
    )
}
DONE, SPENT, BEREFT = 0, 3, 4  # exit codes; the last of a rank whose peer was killed
PEER_IS_GONE = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
)  # what gloo says
RANKS, PATIENCE = 2, 60  # seconds until a rank that waits for a killed one is taken for hanging


class Classifier(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


def rows():
    return [{"x": [i / 40, 1.0, -i / 40], "labels": i % 2} for i in range(40)]


def collate(examples):
    return {"x": torch.tensor([e["x"] for e in examples]), "labels": torch.tensor([e["labels"] for e in examples])}


def per_example_loss(logits, labels):
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def arguments(folder, **changes):
    values = {"output_dir": str(folder), "target_epsilon": TARGET, "target_delta": DELTA, "accountant": ACCOUNTANT, "expected_batch_size": 8,
              "per_device_train_batch_size": 4, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1,
              "logging_steps": 1, "learning_rate": 0.1, "use_cpu": True, "disable_tqdm": True, "self_check": False,
              "remove_unused_columns": False}  # fmt: skip
    return DPTrainingArguments(**{**values, **changes})


def with_mechanism(mechanism):
    return {"mechanism": mechanism, "target_epsilon": None, "expected_batch_size": None, "max_steps": -1}


def build(cls, folder, callbacks=(), data=None, model=None, **changes):
    return cls(model or Classifier(), arguments(folder, **changes), collate, data or rows(), callbacks=list(callbacks), per_example_loss_func=per_example_loss)  # fmt: skip


# ---- one attempt, in a process of its own ----


class Attempt:
    """Trains, notes what happens, and kills itself when it comes for the n-th time to the named point."""

    def __init__(self, folder, rank, point=None, occurrence=1, sharded=False, noise=None):
        self.folder, self.point, self.left, self.sharded = Path(folder), point, occurrence, sharded
        self.noise = noise
        self.journal = open(self.folder / f"journal{rank}", "ab", buffering=0)  # noqa: SIM115
        self.draw = None

    def note(self, **entry):
        self.journal.write(json.dumps(entry).encode() + b"\n")
        os.fsync(self.journal.fileno())

    def reached(self, point):
        if point is None or point != self.point:
            return False
        self.left -= 1
        return self.left == 0

    def at(self, point):
        if self.reached(point):
            time.sleep(0.05 * (distributed.world_size() > 1))  # the others run ahead as far as they can
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner, name, before=None, after=None, cut=None, counts=lambda *args, **kwargs: True):
        """Kill before or after a call that counts, or after half of what it should do."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            if not counts(*args, **kwargs):
                return real(*args, **kwargs)
            self.at(before)
            if cut and self.reached(cut[0]):
                cut[1](real, *args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            self.at(after)
            return result

        setattr(owner, name, call)

    def instrument(self):
        def half_a_line(real, ledger, entry):
            ledger._file.write(json.dumps(entry).encode()[:9])

        def path(*args, **kwargs):
            return next((a for a in (*args, *kwargs.values()) if isinstance(a, (str, os.PathLike))), None)

        def half_a_file(real, *args, **kwargs):
            real(*args, **kwargs)
            os.truncate(path(*args, **kwargs), os.path.getsize(path(*args, **kwargs)) // 2)

        def half_a_folder(real, path, *args, **kwargs):
            for file in sorted(Path(path).iterdir())[::2]:
                file.unlink()

        self.around(Ledger, "open", after="ledger locked")
        self.around(Ledger, "begin", before="before begin", after="after begin")
        self.around(Ledger, "_append", cut=("in a ledger line", half_a_line))
        self.around(Ledger, "add_step", before="before the ledger line", after="between ledger line and noise")
        for owner, name in ((safetensors.torch, "save_file"), (torch, "save"), (TrainerState, "save_to_json")):
            self.around(
                owner, name, before="between checkpoint files", cut=("in a checkpoint file", half_a_file), counts=path
            )
        self.around(PrivacyState, "save", before="before the privacy state")
        self.around(os, "replace", before="before the privacy state is in place", after="after the privacy state")
        self.around(
            checkpoint.shutil, "rmtree", before="before a deletion", cut=("in a deletion", half_a_folder), after="after a deletion",
        )  # fmt: skip
        draw_noise = GaussianNoise._numbers

        def noted(noise, count, device):
            values = draw_noise(noise, count, device)
            self.note(noise=hashlib.sha256(values.numpy().tobytes()).hexdigest(), run=self.trainer._run.state.run_id, draw=self.draw)  # fmt: skip
            self.at("between noise and optimizer")
            return values

        GaussianNoise._numbers = noted
        add = CorrelatedStream.add_

        def noted_add(stream, tensors, std):
            noise = [torch.zeros_like(tensor) for tensor in tensors]
            add(stream, noise, std)
            content = b"".join(tensor.numpy().tobytes() for tensor in noise)
            self.note(released=hashlib.sha256(content).hexdigest(), run=self.trainer._run.state.run_id)
            self.at("between noise and optimizer")
            torch._foreach_add_(tensors, noise)

        CorrelatedStream.add_ = noted_add
        release = PrivateStep.release

        def noted_release(step, optimizer):
            self.draw = f"{os.getpid()} {self.trainer.state.global_step}"
            release(step, optimizer)

        PrivateStep.release = noted_release

    def run(self):
        self.instrument()
        attempt = self

        class Noted(DPTrainer):
            def _save_checkpoint(self, *args):
                attempt.note(saving=self.state.global_step, run=self._run.state.run_id, digest=attempt.digest())
                super()._save_checkpoint(*args)
                attempt.note(saved=self.state.global_step, run=self._run.state.run_id)

        class Points(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                attempt.note(begun=state.global_step, digest=attempt.digest(), **attempt.spent())
                attempt.at("training begins")

            def on_optimizer_step(self, args, state, control, **kwargs):
                attempt.at("after the optimizer")

            def on_log(self, args, state, control, logs, **kwargs):
                attempt.note(logged=logs["epsilon"], **attempt.spent())
                attempt.at("after a log line")

        layout = {"fsdp": True, "fsdp_config": {"version": 2}} if self.sharded else {}
        given = {} if self.noise is None else with_mechanism(CORRELATED[self.noise][0])
        self.trainer = build(Noted, self.folder, [Points()], **layout, **given)
        assert (
            self.trainer.accelerator.num_processes == distributed.world_size() == int(os.environ.get("WORLD_SIZE", 1))
        )
        try:
            self.trainer.train(resume_from_checkpoint=True)
        except PrivacyStateError as error:
            if "no complete checkpoint" not in str(error):
                raise
            self.trainer.train()
        except ValueError as error:
            if "budget is spent" not in str(error):
                raise
            self.note(refused=True, **self.spent())
            return SPENT
        self.note(done=self.trainer.state.global_step, **self.spent())
        return DONE

    def spent(self):
        spent = self.trainer.privacy_spent()
        return {"run": self.trainer._run.state.run_id, "steps": spent.steps, "epsilon": spent.epsilon, "sigma": spent.noise_multiplier}  # fmt: skip

    def digest(self):
        """Of everything that a checkpoint must bring back to this rank: weights, optimizer, schedule."""
        trainer = self.trainer
        moments = [t for s in trainer.optimizer.state_dict()["state"].values() for t in s.values()]
        tensors = [*trainer.model.state_dict().values(), *moments]
        content = (
            b"".join(to_local(t).detach().numpy().tobytes() for t in tensors)
            + str(trainer.lr_scheduler.state_dict()["last_epoch"]).encode()
        )
        return hashlib.sha256(content).hexdigest()


def one_rank(job, rank):
    """The process of one rank, started: training on its own or together with the others."""
    process = os.fork()
    if process:
        return process
    code = 1
    signal.alarm(PATIENCE)
    try:
        sys.stdout = sys.stderr
        if job["ranks"] > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"])
            )
            store = f"file://{job['folder']}/rendezvous"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=job["ranks"], timeout=timedelta(seconds=PATIENCE / 2)
            )
        mortal = rank in job["victims"]
        point = job["point"] if mortal else None
        code = Attempt(job["folder"], rank, point, job["occurrence"], job["sharded"], job["noise"]).run()
    except RuntimeError as error:
        traceback.print_exc()
        code = BEREFT if any(words in str(error).lower() for words in PEER_IS_GONE) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def serve():
    """For each line, a job (see `attempt`): fork its ranks, kill victims after `delay` seconds, answer {"statuses",
    "seconds"}."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        build(
            DPTrainer, json.loads(sys.stdin.readline())["folder"]
        ).train()  # what the first training imports and caches
    gc.freeze()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        Path(job["folder"], "rendezvous").unlink(missing_ok=True)
        start = time.perf_counter()
        processes = [one_rank(job, rank) for rank in range(job["ranks"])]
        if job["delay"] is not None:
            time.sleep(job["delay"])
            for rank in job["victims"]:
                os.kill(processes[rank], signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps({"statuses": statuses, "seconds": time.perf_counter() - start}), flush=True)


# ---- lives, and what must be true of them ----


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection():
    """Trainer collects garbage in every training: no need to walk through all modules each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip


@pytest.fixture(scope="module")
def attempt(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "w") as errors:
        server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(),
        )  # fmt: skip

    def ask(folder, point=None, occurrence=1, delay=None, ranks=1, victims=(0,), sharded=False, noise=None):
        """Train in `folder` on that many ranks, of which the victims are killed; what became of it, and how long it
        took."""
        Path(folder).mkdir(exist_ok=True)
        job = {
            "point": point, "occurrence": occurrence, "delay": delay, "ranks": ranks, "victims": victims, "sharded": sharded, "noise": noise,
        }  # fmt: skip
        server.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, log.read_text()[-3000:]
        answer = json.loads(answer)
        ends = set(answer.pop("statuses", []))
        answer["killed"] = -signal.SIGKILL in ends
        assert len(ends) < 2 or answer["killed"], log.read_text()[-3000:]
        assert ends <= ({DONE, SPENT} | ({-signal.SIGKILL, BEREFT} if answer["killed"] else set())), (
            ends,
            log.read_text()[-3000:],
        )
        return answer

    ask(log.parent / "warm")
    yield ask
    server.stdin.close()
    server.wait()
    server.stdout.close()


def check(folder, noise=None):
    """Everything this file promises, from the journals and the ledger of a life. Returns the hashes of what was added
    to gradients."""
    seen = [added for journal in folder.glob("journal*") for added in check_rank(folder, journal, noise)]
    assert len(set(seen)) == len(seen), "noise was used twice"
    return seen


def check_rank(folder, journal, noise):
    ledger, draws, seen, taken, saving, saved, last = Ledger(folder), {}, [], {}, {}, {}, {}
    for line in journal.read_text().splitlines():
        entry = json.loads(line)
        run = entry["run"]
        if "noise" in entry:
            process, step = entry["draw"].split()
            taken.setdefault(entry["noise"], []).append((process, int(step)))
            draws.setdefault(run, {}).setdefault(entry["draw"])
        if ("noise" if noise is None else "released") in entry:
            seen.append(entry["noise" if noise is None else "released"])
        if "saving" in entry:
            saving[run, entry["saving"]] = entry["digest"]
        if "saved" in entry:
            saved[run] = entry["saved"]
        if entry.get("begun"):
            assert entry["begun"] >= saved.get(run, 0), "lost more than the steps since the last checkpoint"
            assert entry["digest"] == saving[run, entry["begun"]], "what was loaded is not what was saved"
        elif "begun" in entry:
            assert not saved, "started anew although there was a checkpoint"
        if "epsilon" in entry:
            assert entry["steps"] >= len(draws.get(run, ())), "epsilon leaves out steps whose noise was drawn"
            assert entry["epsilon"] == entry.get("logged", entry["epsilon"])
            if noise is None:
                assert entry["epsilon"] == pytest.approx(epsilon(entry["sigma"], entry["steps"]), rel=1e-9)
                assert entry["epsilon"] <= TARGET
            else:
                lives = Counter(draw.split()[0] for draw in draws.get(run, ()))
                assert entry["epsilon"] >= composed(noise, tuple(lives.values())) * (1 - 1e-9)
            last = entry
    for number in taken.values():
        processes, steps = zip(*number, strict=True)
        assert len(set(processes)) == 1, "a resumed process drew what another one had drawn"
        assert list(steps) == list(range(steps[0], steps[0] + len(steps))), "noise came again after other steps"
        assert len(steps) <= (1 if noise is None else CORRELATED[noise][1])
    for run, drawn in draws.items():
        assert len(drawn) <= ledger.steps(run) and (noise is not None or ledger.steps(run) <= STEPS)
    if noise is not None and "done" in last:
        segments = ledger.segments(last["run"])
        assert last["done"] == STEPS and last["steps"] == ledger.steps(last["run"])
        assert last["epsilon"] == pytest.approx(composed(noise, tuple(s.total() for s in segments)), rel=1e-9)
    elif "done" in last or "refused" in last:
        assert last["steps"] == ledger.steps(last["run"])
        assert (
            last.get("done") == STEPS or epsilon(last["sigma"], last["steps"] + 1) > TARGET or last["steps"] == STEPS
        )
    return seen


@functools.lru_cache
def composed(noise, lives):
    """ε of lives of so many steps, none of which takes back what one before added."""
    mechanism = CORRELATED[noise][0]
    return mechanism.epsilon(DELTA, executed=[mechanism.planned(0, n) for n in lives if n], accountant=ACCOUNTANT)


@functools.lru_cache
def epsilon(sigma, steps):
    return compute_epsilon(
        noise_multiplier=sigma * WITH_LOSS, sample_rate=8 / 40, steps=steps, delta=DELTA, accountant=ACCOUNTANT
    )


def live(attempt, folder, kills, **layout):
    """Number of attempts that were really killed, and the noise hashes."""
    killed = 0
    for kill in kills:
        if not attempt(folder, **kill, **layout)["killed"]:
            break
        killed += 1
        check(folder, layout.get("noise"))
    attempt(folder, **layout)
    return killed, check(folder, layout.get("noise"))


# There is a checkpoint of six files every third step, and the one before is then deleted, as is a half-written one
# before it is written again; the ledger has a line for each start and one for each of at most sixteen steps; a step
# draws one vector of noise.
NASTY_LIVES = [
    [("between ledger line and noise", 4), ("ledger locked", 1), ("before begin", 1), ("after begin", 1), ("training begins", 1)],
    [("in a checkpoint file", 2), ("between noise and optimizer", 4), ("in a ledger line", 2), ("between checkpoint files", 4)],
    [("before the privacy state", 1), ("in a checkpoint file", 8), ("in a ledger line", 1), ("in a deletion", 1), ("in a deletion", 2)],
    [("before the privacy state is in place", 2), ("after the privacy state", 1), ("in a checkpoint file", 6), ("before a deletion", 1)],
    [("after the optimizer", 5), ("after a log line", 3), ("before the ledger line", 2), ("after a deletion", 2)],
    [("in a checkpoint file", 1), ("in a checkpoint file", 9), ("in a checkpoint file", 4), ("in a checkpoint file", 5)],
]  # fmt: skip
POINTS = sorted({point for kills in NASTY_LIVES for point, _ in kills})


# The same of two ranks; the last number is the rank that is killed. The sum over ranks comes after the noise: a rank
# that is killed before its optimizer steps leaves the other with the noised gradient.
NASTY_LIVES_OF_RANKS = [
    [("between ledger line and noise", 4, 0), ("between noise and optimizer", 3, 0), ("after begin", 1, 0), ("after the optimizer", 2, 1)],
    [("in a checkpoint file", 2, 0), ("in a checkpoint file", 2, 1), ("in a ledger line", 3, 0), ("before the privacy state", 1, 0)],
    [("after a log line", 3, 0), ("after a log line", 2, 1), ("before the ledger line", 3, 0), ("after the privacy state", 1, 0)],
]  # fmt: skip


@pytest.mark.parametrize("kills", NASTY_LIVES, ids=lambda kills: kills[0][0])
def test_killed_at_the_nasty_points(tmp_path, attempt, kills):
    killed, _ = live(attempt, tmp_path / "life", [{"point": point, "occurrence": n} for point, n in kills])
    assert killed == len(kills)


@pytest.mark.table("kills")
@pytest.mark.parametrize("kills", NASTY_LIVES_OF_RANKS, ids=lambda kills: kills[0][0])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_a_rank_killed_at_the_nasty_points(tmp_path, attempt, kills, sharded):
    plan = [{"point": point, "occurrence": n, "victims": [rank]} for point, n, rank in kills]
    killed, _ = live(attempt, tmp_path / "life", plan, ranks=RANKS, sharded=sharded)
    assert killed == len(kills)


LAYOUTS = {"one": (1, False), "ddp": (RANKS, False), "fsdp": (RANKS, True)}
RANDOM_LIVES = [*((name, None) for name in LAYOUTS), *((name, n) for name in ("one", "fsdp") for n in CORRELATED)]


@pytest.mark.table("kills")
@pytest.mark.parametrize(("name", "noise"), RANDOM_LIVES)
def test_killed_at_random(tmp_path, attempt, name, noise):
    """At random times, and for the n-th time at random points; of several ranks one, or all at once."""
    ranks, sharded = LAYOUTS[name]
    layout = {"ranks": ranks, "sharded": sharded, "noise": noise}
    duration, chance = attempt(tmp_path / "whole", **layout)["seconds"], random.Random(4)
    kills, lives, added = 0, 0, []
    while kills < int(os.environ.get("KILLS", "4" if noise is None else "2")):
        plan = [
            {"delay": chance.uniform(0, duration)},
            {"point": chance.choice(POINTS), "occurrence": chance.randint(1, 12)},
        ] * 2
        plan = [{**kill, "victims": chance.sample(range(ranks), chance.randint(1, ranks))} for kill in plan]
        killed, seen = live(attempt, tmp_path / str(lives), chance.sample(plan, len(plan)), **layout)
        kills, lives, added = kills + killed, lives + 1, added + seen
    assert len(set(added)) == len(added)
    print(f"{name}, {noise or 'independent'} noise: {kills} kills in {lives} lives, {len(added)} noise vectors")


# ---- what may change on resume, and what may not ----


@pytest.fixture
def trained(tmp_path):
    build(DPTrainer, tmp_path, max_steps=6).train()
    return tmp_path


def lines(folder):
    return Ledger(folder).path.read_text().count('"step"')


class Meddles(TrainerCallback):
    """Something else writes to the folder after a step."""

    def __init__(self, folder, how, step):
        self.path, self.how, self.step = Ledger(folder).path, how, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.copy = self.path.read_bytes()
        if state.global_step == self.step:
            if self.how == "replaces":
                (self.path.parent / "new").write_bytes(self.copy)
                os.replace(self.path.parent / "new", self.path)
            elif self.how == "removes":
                self.path.unlink()
            else:
                self.path.write_bytes(self.copy)


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("how", ["replaces", "removes", "cuts"])
def test_a_ledger_that_something_else_changes_ends_the_training(tmp_path, how, step):
    """At the next step, or after the last one: the certificate is made of it."""
    with pytest.raises(PrivacyStateError, match="was changed, replaced or removed by something else"):
        build(DPTrainer, tmp_path, [Meddles(tmp_path, how, step)], max_steps=6).train()


@pytest.mark.parametrize("name", ["sampling", "noise_multiplier", "run_id"])
def test_what_the_checkpoint_says_wins_or_is_refused(trained, name):
    """Another sampling is refused, a sigma from the checkpoint is used from then on, and no step before counts by it;
    an unknown run has no ledger."""
    path = trained / "checkpoint-6" / STATE_NAME
    content = json.loads(path.read_text())
    if name == "sampling":
        content["mechanism"]["sampling"]["kind"] = "shuffle"
    elif name == "noise_multiplier":
        content["mechanism"]["noise"][name] = 900.0
    else:
        content[name] = "another"
    path.write_text(json.dumps(content))
    trainer = build(DPTrainer, trained, max_steps=8)
    messages = {
        "sampling": "no Sampling of kind 'shuffle'",
        "noise_multiplier": "trained with releases=",  # the logged loss has ten times as much
        "run_id": "holds 0 steps",
    }
    with pytest.raises(PrivacyStateError, match=messages[name]):
        trainer.train(resume_from_checkpoint=True)


def test_steps_count_with_the_noise_that_the_ledger_says(tmp_path):
    """Not with that of a checkpoint that was changed."""
    build(DPTrainer, tmp_path, max_steps=6, log_raw_metrics=True).train()
    path = tmp_path / "checkpoint-6" / STATE_NAME
    content = json.loads(path.read_text())
    before = content["mechanism"]["noise"]["noise_multiplier"]
    content["mechanism"]["noise"]["noise_multiplier"] = 900.0
    path.write_text(json.dumps(content))
    trainer = build(DPTrainer, tmp_path, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    epsilon = phases_epsilon([(before, 0.2, 6), (900.0, 0.2, 2)], DELTA, ACCOUNTANT)
    assert trainer.privacy_spent().epsilon == pytest.approx(epsilon, rel=1e-9)


def test_accountant_and_physical_batch_size_may_change(trained):
    """Both accountants bound the same run from above: epsilon is that of all its steps, by the one asked for."""
    trainer = build(DPTrainer, trained, max_steps=8, accountant="pld", per_device_train_batch_size=3)
    trainer.train(resume_from_checkpoint=True)
    spent = trainer.privacy_spent()
    exact = compute_epsilon(
        noise_multiplier=spent.noise_multiplier * WITH_LOSS, sample_rate=0.2, steps=8, delta=DELTA, accountant="pld"
    )
    assert (spent.steps, spent.accountant, spent.epsilon) == (8, "pld", pytest.approx(exact, rel=1e-9))


def test_an_incomplete_checkpoint_is_refused_by_name_and_passed_over_otherwise(tmp_path, caplog):
    options = {"target_epsilon": None, "noise_multiplier": 1.0, "save_total_limit": 2}
    build(DPTrainer, tmp_path, max_steps=6, **options).train()
    os.truncate(tmp_path / "checkpoint-6" / "optimizer.pt", 100)
    with pytest.raises(PrivacyStateError, match=r"optimizer.pt' has 100 bytes.*Resume from another checkpoint"):
        build(DPTrainer, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert lines(tmp_path) == 6
    trainer = build(DPTrainer, tmp_path, max_steps=7, **options)
    trainer.train(resume_from_checkpoint=True)
    assert "resuming from" in caplog.text and "newer checkpoints are not complete" in caplog.text
    assert trainer.privacy_spent().steps == 6 + 4 == lines(tmp_path)


def test_a_full_disk_says_what_is_counted_and_how_to_go_on(tmp_path, monkeypatch, caplog):
    save = Trainer._save_checkpoint

    def full(self, model, trial):
        if self.state.global_step > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, model, trial)

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    options = {"target_epsilon": None, "noise_multiplier": 1.0, "max_steps": 6, "save_total_limit": 2}
    trainer = build(DPTrainer, tmp_path, **options)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert trainer.args.save_total_limit == 2
    assert "counts all 6 steps" in caplog.text and "resume_from_checkpoint=True" in caplog.text
    assert "When there is room again, go on" in caplog.text
    monkeypatch.undo()
    trainer = build(DPTrainer, tmp_path, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_spent().steps == 6 + 3 == lines(tmp_path)


# ---- one writer ----


def test_a_second_training_counts_what_another_process_added(tmp_path):
    free = {"target_epsilon": None, "noise_multiplier": 1.0, "max_steps": 3}
    first = build(DPTrainer, tmp_path, **free)
    first.train()
    build(DPTrainer, tmp_path, **{**free, "max_steps": 5}).train(resume_from_checkpoint=True)
    first.train()
    assert first.privacy_spent().steps == 3 + 2 + 3 == lines(tmp_path)
    Ledger(tmp_path).path.unlink()
    with pytest.raises(PrivacyStateError, match="holds 0 steps.*executed 8 at least"):
        first.train()


def ranks(folder):
    """What each of two ranks does, on a resume of one rank's training."""
    options = {"target_epsilon": None, "noise_multiplier": 1.0, "max_steps": 6}
    trainer = build(DPTrainer, folder, **options)
    if distributed.rank() == 1:

        def unseen(*args):
            raise AssertionError("only rank 0 reads and writes the ledger")

        Ledger.open = Ledger.steps = Ledger.begin = Ledger.add_step = unseen
        save_rng = Trainer._save_rng_state
        Trainer._save_rng_state = lambda *args: (time.sleep(0.5), save_rng(*args))  # a slow disk
    trainer.train(resume_from_checkpoint=True)
    result = {"world": distributed.world_size(), "steps": trainer.privacy_spent().steps}
    fresh = build(DPTrainer, folder, **options)
    holder = Ledger(folder)
    if distributed.rank() == 0:
        holder.open()
    try:
        fresh.train()
    except PrivacyStateError as error:
        result["refused"] = str(error)
    holder.close()
    return result


def test_on_another_number_of_ranks_with_one_writer(tmp_path):
    free = {"target_epsilon": None, "noise_multiplier": 1.0}
    folder = tmp_path / "life"
    build(DPTrainer, folder, **free, max_steps=3).train()
    world = World("test_resume", tmp_path)
    for seen in world.run("ranks", "life"):
        assert (seen["world"], seen["steps"]) == (2, 6)
        assert "another training is writing" in seen["refused"]
    world.end()
    files = json.loads((folder / "checkpoint-6" / STATE_NAME).read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(files)  # complete means: every rank has written its part
    trainer = build(DPTrainer, folder, **free, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_spent().steps == 8 == lines(folder)


# ---- full disks, dead workers, long runs ----


@pytest.mark.parametrize("fault", ["write", "fsync"])
def test_a_step_that_cannot_be_recorded_is_not_taken(tmp_path, monkeypatch, fault):
    drawn, draw = [], GaussianNoise.add_

    def drawing(noise, grads, std):
        if not isinstance(noise, Dither):
            drawn.append(std)
        draw(noise, grads, std)

    monkeypatch.setattr(GaussianNoise, "add_", drawing)
    trainer = build(DPTrainer, tmp_path, save_strategy="no")
    weights = lambda: [p.detach().clone() for p in trainer.model.parameters()]  # noqa: E731

    class FullDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                self.weights = weights()
                monkeypatch.setattr(
                    *{"fsync": (os, "fsync"), "write": (trainer._run.ledger._file, "write")}[fault], full
                )

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = FullDisk()
    trainer.add_callback(disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    assert len(drawn) == 2 * trainer.privacy_spent().steps == 2 * trainer.state.global_step == 4  # gradients and loss
    assert all(torch.equal(p, q) for p, q in zip(weights(), disk.weights, strict=True))
    assert lines(tmp_path) == {"write": 2, "fsync": 3}[fault]


class Deadly(torch.utils.data.Dataset):
    def __init__(self, how):
        self.rows, self.how = rows(), how

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if i == 7 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "killed" else os._exit(self.how)
        return self.rows[i]


def by_trainer(folder, data, steps, batch_size, workers=0, mode="auto", model=None, after_step=lambda step: None):
    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after_step(state.global_step)

    options = {"expected_batch_size": batch_size, "per_device_train_batch_size": batch_size, "max_steps": steps, "clipping_mode": mode,
               "target_epsilon": None, "noise_multiplier": 1.0, "save_strategy": "no", "logging_strategy": "no", "dataloader_num_workers": workers}  # fmt: skip
    trainer = build(DPTrainer, folder, [Watch()], data, model, **options)
    try:
        trainer.train()
    finally:
        assert trainer.privacy_spent().steps == lines(folder)


def by_engine(folder, data, steps, batch_size, workers=0, mode="auto", model=None, after_step=lambda step: None):
    model, engine = model or Classifier(), PrivacyEngine(ledger_dir=folder)
    by_loss = mode != "ghost"  # an ordinary loss.backward()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=None if by_loss else nn.CrossEntropyLoss(), clipping_mode=mode,
        data_loader=torch.utils.data.DataLoader(data, batch_size, collate_fn=collate, num_workers=workers),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    optimizer, loader, criterion, step = made[1], made[-1], nn.CrossEntropyLoss() if by_loss else made[2], 0
    try:
        while step < steps:
            for batch in loader:
                optimizer.zero_grad()
                criterion(model(batch["x"]), batch["labels"]).backward()
                optimizer.step()
                step += 1
                after_step(step)
    finally:
        engine.detach()
        assert step == lines(folder)


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # torch's, over which a tensor was on its way
@pytest.mark.parametrize("how", ["killed", 1, 0])
@pytest.mark.parametrize("train", [by_trainer, by_engine])
def test_a_dead_worker_is_an_error_and_no_hang(tmp_path, monkeypatch, train, how):
    monkeypatch.setattr(
        torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5
    )  # how often a quiet worker is looked after

    def hangs(*args):
        raise AssertionError("training hangs")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    try:
        # the other errors are torch's where the worker dies while a tensor is on its way
        with pytest.raises((RuntimeError, ConnectionError, EOFError), match="DataLoader worker|Connection reset|^$"):
            train(tmp_path, Deadly(how), steps=STEPS, batch_size=20, workers=1)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert lines(tmp_path) < STEPS


@pytest.mark.parametrize(("train", "mode"), [(by_trainer, "ghost"), (by_engine, "book_keeping")])
def test_memory_does_not_grow_with_steps(tmp_path, train, mode):
    """Tensors that Python knows, blocks that Python holds, and all that the process holds, from step 100 to step
    300."""
    seen, width = [], 2000

    def watch(step):
        if step % 100 == 0:
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            seen.append((tensors, sys.getallocatedblocks(), psutil.Process().memory_info().rss))

    train(
        tmp_path, rows(), 300, batch_size=40, mode=mode, model=Classifier(width), after_step=watch
    )  # q = 1: every draw is as large
    tensors, blocks, resident = zip(*seen, strict=True)
    assert len(set(tensors)) == 1
    assert blocks[2] - blocks[1] < 3 * 100, "blocks of memory that Python holds more after 100 steps"
    assert resident[2] - resident[0] < 200 * 4 * 40 * width / 4, "a quarter of what one activation of every step takes"


if __name__ == "__main__":
    serve()
