"""How many planted bugs the tests of a push find: `python tests/planted_bugs.py [--root CHECKOUT] [NAME ...]`.

Each bug is a few replaced words in a copy of a checkout, in which the tests of the files that are concerned are run as
for a push, until one fails. What no test finds is printed as MISSED.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import peft  # noqa: F401  # imported once for all of them
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Bug:
    """``changes`` are (words, what stands in their place); the words are in one place of the package."""

    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]  # below tests/, the cheapest first


def bug(old: str, new: str, *tests: str) -> Bug:
    return Bug(((old, new),), tests)


BUGS = {
    "a sign in a term": bug(
        "terms[module.bias] = _sum_positions(backprops, dims)",
        "terms[module.bias] = _sum_positions(-backprops, dims)",
        "clipping/rules/test_normalization.py",
    ),
    "a weight of a row dropped": bug(
        "coef_b if weights_b is None else coef_b * weights_b",
        "coef_b",
        "clipping/test_modes.py",
        "clipping/test_clipper.py",
    ),
    "a person's rows clipped one by one": bug(
        "norms = self.clipper.backward(losses, weights, unit_ids=unit_ids,",
        "norms = self.clipper.backward(losses, weights, unit_ids=None,",
        "test_units.py",
    ),
    "a person in two batches": bug(
        "if not batches or sum(map(len, batches[-1])) + len(unit) > most:",
        "if not batches or len(batches[-1]) >= 2:",
        "test_units.py",
    ),
    "a row of a unit without its weight": bug(
        "return losses_b / sizes_u[unit_ids], unit_ids", "return losses_b, unit_ids", "test_units.py"
    ),
    "a coefficient above 1": bug(
        "(self.max_grad_norm / norms_b).clamp(max=1.0)",
        "self.max_grad_norm / norms_b",
        "clipping/test_clipping_functions.py",
        "clipping/test_clipper.py",
    ),
    "the bound of another group": bug(
        "checked_clipping(group.clipping), group.noise_scale",
        "checked_clipping(groups[0].clipping), group.noise_scale",
        "clipping/test_groups.py",
    ),
    "inner products above the diagonal once": bug("on_diagonal + 2 * column", "on_diagonal + column", "clipping/terms/test_terms.py"),
    "an id that repeats, not added up": bug(
        "is_repeated = sorted_ids[:, 1:] == sorted_ids[:, :-1]",
        "is_repeated = torch.zeros_like(sorted_ids[:, 1:], dtype=torch.bool)",
        "clipping/rules/test_embedding.py",
    ),
    "an example that is not finite, kept": bug(
        "term = term if invalid_b is None else term.zero_examples(invalid_b.to(device))",
        "term = term",
        "clipping/test_modes.py",
    ),
    "the forget gate twice": bug("dc_bh.mul_(self._f_t[t])", "dc_bh.mul_(self._f_t[t].square())", "clipping/rules/test_recurrent.py"),
    "a bias of keys for one of values": bug(
        "zip((module.bias_k, module.bias_v), added",
        "zip((module.bias_v, module.bias_k), added",
        "clipping/rules/test_attention.py",
    ),
    "a second step of one backward": bug(
        "given.stage is not Stage.SUMMED",
        "given.stage is None",
        "test_violations.py::test_what_scripts_do_is_bounded_or_refused[calls: step twice-engine]",
    ),
    "padding counted in a mean": bug(
        "losses_bt.sum(1) / (labels != IGNORE_INDEX).sum(1).clamp(min=1)",
        "losses_bt.sum(1) / (labels == labels).sum(1).clamp(min=1)",
        "test_losses.py",
    ),
    "a gradient that is not put back": bug(
        "for p, grad in grads:\n                    p.grad = grad",
        "for p, _ in grads:\n                    p.grad = None",
        "test_suspended.py",
    ),
    "the division forgotten": bug("    torch._foreach_div_(grads, divisor)\n", "", "test_noise.py", "test_trajectories.py"),
    "the division by the rows of a physical batch": bug(
        "            divisor=used.expected_batch_size,",
        "            divisor=max(1, len(clipper.norms)),",
        "test_trajectories.py",
    ),
    "rows that fill a batch, counted": bug(
        "own_b = (torch.arange(own + batch.fillers) < own).float()",
        "own_b = torch.ones(own + batch.fillers)",
        "test_filled_batches.py",
    ),
    "noise of a key that is always the same": bug(
        "[secrets.randbits(256) if dp_seed is None else dp_seed]",
        "[7 if dp_seed is None else dp_seed]",
        "test_noise.py",
    ),
    "a draw that was shown, not counted": bug("        if not self.unfinished or self.steps_left < 1:", "        if True:", "test_run.py"),
    "one parameter without noise": bug("noise.add_(grads, std=std)", "noise.add_(grads[:-1], std=std)", "test_noise.py", "test_trainer.py"),
    "noise on each rank": bug("if sharded or distributed.rank() == 0:", "if True:", "test_distributed.py"),
    "an example that is never drawn": bug(
        "generator.binomial(sampling.num_examples, sampling.at(step)[0])), largest)\n        yield generator.choice(sampling.num_examples,",
        "generator.binomial(sampling.num_examples - 1, sampling.at(step)[0])), largest)\n        yield generator.choice(sampling.num_examples - 1,",
        "test_mechanism.py",
        "test_data.py",
    ),
    "a step that is not counted": bug("segments[-1][parameters] += 1", "segments[-1][parameters] += 0", "test_run.py", "test_trainer.py"),
    "noise before the ledger": Bug(
        (
            (
                "used = self.run.spend_step(self.number)",
                "used = self.run.mechanism.at(self.number)._replace(max_grad_norm=self._clipping.sensitivity)",
            ),
            (
                "        self._released += 1\n",
                "        self._released += 1\n        self.run.spend_step(self.number)\n",
            ),
        ),
        ("test_resume.py::test_a_step_that_cannot_be_recorded_is_not_taken", "test_resume.py"),
    ),
}  # fmt: skip


def plant(root: Path, changes: tuple[tuple[str, str], ...]) -> None:
    """Replace the words in the package below ``root``."""
    for old, new in changes:
        files = [path for path in (root / "dp_transformers").rglob("*.py") if old in path.read_text()]
        assert len(files) == 1 and files[0].read_text().count(old) == 1, f"{len(files)} files have {old!r}"
        files[0].write_text(files[0].read_text().replace(old, new))


def finding(root: Path, tests: tuple[str, ...], log: Path) -> str | None:
    """The file of tests that fails, in a process of its own."""
    for name in tests:
        process = os.fork()
        if not process:
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(root)
            os.environ["PYTHONPATH"] = str(root)
            sys.path[:0] = [str(root)]
            os._exit(pytest.main(["-x", "-p", "no:cacheprovider", str(root / "tests" / name)]))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, 1), f"pytest ended with {code}:\n{log.read_text()[-3000:]}"
        if code == 1:
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(BUGS), help="default: all bugs")
    given = parser.parse_args()
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=given.root, capture_output=True, text=True)
    os.environ.setdefault("DP_TEST_PART", done.stdout.strip())
    found = 0
    for name in given.names:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "checkout")
            shutil.copytree(given.root, root, ignore=shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__"))
            plant(root, BUGS[name].changes)
            where = finding(root, BUGS[name].tests, Path(folder, "log"))
        found += where is not None
        print(f"{name}: {'MISSED' if where is None else 'found by ' + where}", flush=True)
    print(f"{found} of {len(given.names)} found")
    sys.exit(found < len(given.names))


if __name__ == "__main__":
    main()
