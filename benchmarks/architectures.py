"""Every architecture that transformers registers under nine heads, tiny and with random weights: is clipping exact?

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only Bart Siglip --again crash refused

A *cell* is a task and a class. Each is run in a process of its own: all parameters are trained by PerExampleClipper in
training mode without dropout, and norms and clipped sum are compared with one example at a time through plain
autograd. The loss is the one that DPTrainer finds for the head, or a fixed random function of the outputs where it
knows none.

The outcome of a cell is one line of the results file. Cells that are in the file are not run again, so a sweep that
was stopped goes on. From the file come the tables of docs/models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import multiprocessing
import re
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
import transformers
import transformers.models.llama.modeling_llama  # what all models import, before the forks
from torch import nn

import dp_transformers
from dp_transformers import PerExampleClipper, find_example_losses
from dp_transformers.clipping import fallback, tap
from dp_transformers.clipping.checks.rows import floating_tensors, projected
from dp_transformers.clipping.hooks import configurations, without_caches
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.recorded_call import RecordedCall
from dp_transformers.clipping.terms import Term
from dp_transformers.losses.heads import label_columns

from .harness import Row
from .pages import with_table
from .tiny import TASKS, batch_for, build, cells

RESULTS = Path(__file__).with_name("architectures.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LossFunction = Callable[[dict[str, torch.Tensor]], torch.Tensor]  # batch -> (B,)
TOLERANCE = 1e-4  # of norms and of the clipped sum, relative
MISSING = "package missing"
REFUSED_IN_TRAINING = "refused while batch normalization trains"
OUTCOMES = ("exact", "refused", "wrong", "crash", MISSING, "not made")


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    p.add_argument("--only", nargs="+", default=[""], help="parts of names of classes")
    p.add_argument("--mode", choices=sorted(MODES), default="book_keeping")
    p.add_argument("--again", nargs="+", choices=OUTCOMES, default=[], help="run these again, with what they say now")
    p.add_argument("--seconds", type=float, default=120, help="time limit of a cell")
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every cell")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    done = {key for key, row in read(args.results).items() if row["outcome"] not in args.again}
    for task, name in cells():
        chosen = task in args.tasks and any(part in name for part in args.only)
        if not chosen or (task, name, args.mode) in done:
            continue
        row = in_a_process(task, name, args.mode, args.seconds)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{task} {name}: {row['outcome']} {row.get('reason', '')}".strip(), flush=True)
    rows = read(args.results)
    args.results.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    for lines in tables(list(rows.values())).values():
        print("\n".join(["", *lines]))
    if args.results == RESULTS:
        PAGE.write_text(with_tables(PAGE.read_text(), list(rows.values())))


def read(results: Path) -> dict[tuple[str, str, str], Row]:
    """The last line of every cell."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(row["task"], row["class"], row["mode"]): row for row in map(json.loads, lines)}


# ---- cells ----


def in_a_process(task: str, name: str, mode: str, seconds: float) -> Row:
    """The row of a cell that is measured in a fork of this process, which has imported what takes long."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sending, task, name, mode))
    process.start()
    sending.close()
    try:
        if receiving.poll(seconds):
            return receiving.recv()
        reason = f"did not end within {seconds:g} seconds"
    except EOFError:
        process.join()
        reason = f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return {"task": task, "class": name, "mode": mode, "outcome": "crash", "reason": reason}


def send(pipe: Connection, task: str, name: str, mode: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    pipe.send(measure(task, name, mode))


def measure(task: str, name: str, mode: str = "book_keeping") -> Row:
    """One cell: its outcome, the reason where it is not exact, the errors, and the classes that were re-run."""
    row: Row = {"task": task, "class": name, "mode": mode}
    start = time.perf_counter()
    try:
        model = build(task, name)
        batch = batch_for(model, task)
        losses_of = losses_function(model)
        losses_of(batch)
    except ImportError as error:
        return row | {"outcome": MISSING, "reason": str(error).strip().splitlines()[0]}
    except Exception as error:
        return row | {"outcome": "not made", "reason": reason_of(error)}
    row |= compared(model, losses_of, batch, mode)
    if row["outcome"] == "refused" and (layers := batch_normalization(model)):
        evaluate(layers, losses_of, batch)
        row |= {REFUSED_IN_TRAINING: row.pop("reason"), **compared(model, losses_of, batch, mode)}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def batch_normalization(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The layers that normalise by the statistics of the batch."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]


def evaluate(
    layers: list[nn.modules.batchnorm._BatchNorm], losses_of: LossFunction, batch: dict[str, torch.Tensor]
) -> None:
    """Let these layers evaluate, with the statistics of random inputs like these."""
    for layer in layers:
        layer.momentum = 1.0
    with torch.no_grad():
        rows = {name: x.repeat(32, *(1,) * (x.dim() - 1)) for name, x in batch.items()}
        losses_of({name: torch.randn_like(x) if x.is_floating_point() else x for name, x in rows.items()})
    for layer in layers:
        layer.eval()


def compared(model: nn.Module, losses_of: LossFunction, batch: dict[str, torch.Tensor], mode: str) -> Row:
    """What :func:`compare` finds, or why it does not come to its end."""
    try:
        return compare(model, losses_of, batch, mode)
    except Exception as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = Path(dp_transformers.__file__).parent in Path(raised_in).parents
        return {"outcome": "refused" if is_ours else "crash", "reason": reason_of(error)}


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]


def losses_function(model: nn.Module) -> LossFunction:
    """f(batch) -> (B,): the losses that DPTrainer takes, or a random function of the first output where it knows
    none."""
    try:
        return find_example_losses(model)
    except ValueError:
        names = label_columns(model)
    reads_decoder_inputs = "decoder_input_ids" in inspect.signature(model.forward).parameters

    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: x for name, x in batch.items() if name not in {*names, "labels"}}
        if reads_decoder_inputs:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        output = model(**inputs)
        return projected(floating_tensors(output)[:1])

    return losses_of


def compare(model: nn.Module, losses_of: LossFunction, batch: dict[str, torch.Tensor], mode: str) -> Row:
    """Clip at just less than the median norm, and measure how far norms and sum are from one example at a time."""
    with PerExampleClipper(model, 1.0, mode=mode) as clipper:
        bound = 0.9 * float(clipper.backward(losses_of(batch)).median())
        model.zero_grad()
        with classes_that_are_rerun() as rerun:
            got = clipper.backward(losses_of(batch) / bound).double() * bound  # as with that bound
    parameters = trainable(model)
    # torch 2.13 computes another gradient behind one that evaluates for a batch of one (CPU)
    copies = 1 + any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    with without_caches(configurations(model)):  # FSMT masks no later word while it fills one
        gradients = one_at_a_time(losses_of, parameters, batch, copies)
    sums = [torch.zeros_like(p) if p.grad is None else p.grad * bound for p in parameters]
    norms = torch.stack([length(g) for g in gradients])
    if not norms.max() > 1e-5:
        return {"outcome": "not made", "reason": "all gradients are zero but for rounding"}
    coefficients = (bound / norms).clamp(max=1)
    total = [sum(c * g[k] for c, g in zip(coefficients, gradients, strict=True)) for k in range(len(parameters))]
    norm_error = float(((got - norms).abs() / norms).max())
    sum_error = float(length([a - b for a, b in zip(sums, total, strict=True)]) / length(total))
    right = max(norm_error, sum_error) <= TOLERANCE
    row: Row = {"outcome": "exact" if right else "wrong", "rerun": sorted(rerun)}
    row |= {"norm_error": float(f"{norm_error:.1e}"), "sum_error": float(f"{sum_error:.1e}")}
    if not right:
        row["reason"] = f"norms of {got.tolist()} in the place of {norms.tolist()}"
    return row


@contextlib.contextmanager
def classes_that_are_rerun() -> Iterator[set[str]]:
    """Inside, the names of the classes of modules whose calls the fallback runs again are collected."""
    found: set[str] = set()

    def collect(call: RecordedCall, parameters: dict[nn.Parameter, str]) -> dict[nn.Parameter, Term]:
        found.add(type(call.module).__name__)
        return fallback.per_example_gradients(call, parameters)

    with mock.patch.object(tap, "per_example_gradients", collect):
        yield found


def one_at_a_time(
    losses_of: LossFunction, parameters: list[nn.Parameter], batch: dict[str, torch.Tensor], copies: int = 1
) -> list[list[torch.Tensor]]:
    """For each example the gradients of all parameters, in double precision. With ``copies``, an example stands beside
    so many of its own."""
    found = []
    for i in range(len(next(iter(batch.values())))):
        loss = losses_of({name: x[[i] * copies] for name, x in batch.items()})[0]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        found.append([g.double() for g in grads])
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def length(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.detach().double().norm() for x in tensors]).norm()


# ---- what is shown ----


def with_tables(page: str, rows: Sequence[Row]) -> str:
    for name, lines in tables([row for row in rows if row["mode"] == "book_keeping"]).items():
        page = with_table(page, name, lines)
    return page


def tables(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The lines of each table by its name."""
    return {"architectures": totals(rows), "not exact": reasons(rows), "re-run": ranking(rows)}


def totals(rows: Sequence[Row]) -> list[str]:
    """A line for every task, and one for all. The third and fourth column are parts of the second."""
    columns = ["classes", "exact", "no module re-run", "batch normalization evaluates", *OUTCOMES[1:]]
    lines = [f"| task | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for task in (*TASKS, None):
        its = [row for row in rows if task in (row["task"], None)]
        count = Counter(row["outcome"] for row in its)
        exact = [row for row in its if row["outcome"] == "exact"]
        ruled = sum(not row["rerun"] for row in exact)
        evaluating = sum(REFUSED_IN_TRAINING in row for row in exact)
        figures = [len(its), len(exact), ruled, evaluating, *(count[outcome] for outcome in OUTCOMES[1:])]
        lines.append(f"| {task or 'all'} | " + " | ".join(map(str, figures)) + " |")
    return lines


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for every reason why a class is not exact: those that happen in most cells first."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["outcome"] != "exact":
            groups[row["outcome"], shortened(row["reason"])].append(row)
    lines = ["| outcome | cells | reason | classes |", "|---|---|---|---|"]
    for (outcome, reason), its in sorted(groups.items(), key=lambda item: (OUTCOMES.index(item[0][0]), -len(item[1]))):
        names = ", ".join(sorted({row["class"] for row in its}))
        lines.append(f"| {outcome} | {len(its)} | {reason} | {names} |")
    return lines


def shortened(reason: str) -> str:
    """The reason without the names and figures of one model."""
    reason = re.sub(r"\b[A-Z]\w+(For|With|Model|Encoder)\w*", "…", reason)
    reason = re.sub(r"'[^' ]*'|\d+(\.\d+)?(e[+-]?\d+)?|\bnan\b", "…", reason)
    return reason.replace("|", "\\|")[:220].rstrip()


def ranking(rows: Sequence[Row]) -> list[str]:
    """The classes of modules that are re-run, by the number of cells that have one."""
    count = Counter(name for row in rows for name in row.get("rerun", []))
    by_count: dict[int, list[str]] = defaultdict(list)
    for name, number in count.items():
        by_count[number].append(name)
    lines = ["| cells | classes that are re-run |", "|---|---|"]
    return lines + [f"| {n} | {', '.join(sorted(by_count[n]))} |" for n in sorted(by_count, reverse=True)]


if __name__ == "__main__":
    main()
