"""Contenders taking turns: what every benchmark here runs through.

A *contender* is a function that builds what it needs and returns the *phases* of one step, callables that are timed
one by one. In every repeat each contender has one turn, so a slow minute of the machine slows all of them; medians and
quartiles are over the repeats, and ratios are taken inside a repeat: time of the first contender / time of this one,
so 1.00 is as fast as the first (the ``factor`` is its inverse).
Where one CPU thread works, times are process times, and each contender has a process of its own, as in a training: in
one heap the memory of the others lies between its own, which made products up to twice as slow. Otherwise times are
wall times, in this process. What a contender cannot do is a result too, its `failed`.

A result is a flat row ``{case..., "contender": name, figures...}``; ``x_low`` and ``x_high`` are the quartiles of
``x``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Phase = Callable[[], object]
Contender = Callable[[], Sequence[Phase]]
Row = dict[str, Any]
Turn = tuple[list[float], list[float]]  # seconds of every phase, by the benchmark's clock and by the wall clock

PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "numpy", "opacus", "jax")
WARM_UP = 5  # turns or steps that are not counted: more is checked in passes 1, 2, 3, 5, 9, 17, ...
MEASURED = "measured step"


def parser(doc: str, *, repeats: int = 15) -> argparse.ArgumentParser:
    """The options that all benchmarks have in common."""
    p = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="few repeats of few cases, at most three minutes on one core")
    p.add_argument("--repeats", type=int, default=repeats, help="counted turns of every contender; 3 with --quick")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--no-peers", dest="peers", action="store_false", help="leave other libraries out")
    p.add_argument(
        "--allocator",
        choices=["keep", "default"],
        default="keep",
        help="whether glibc keeps freed memory, for all contenders alike",
    )
    p.add_argument("--json", metavar="PATH", type=Path, help="also write the results there")
    return p


class Benchmark:
    """One run of one benchmark: prepares the process, prints rows as they come, and keeps them in the JSON file."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args, self.rows = name, args, []
        self.device = torch.device(args.device)
        self.repeats = 3 if args.quick else args.repeats
        self.case: Row | None = None
        warnings.simplefilter("ignore")
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        if args.allocator == "keep":
            keep_freed_memory()
        self.on_one_thread = args.device == "cpu" and args.threads == 1
        self.clock = time.process_time if self.on_one_thread else time.perf_counter
        self.machine = machine(self.device) | {"clock": "process time" if self.on_one_thread else "wall time"}
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        self.settings = {k: v for k, v in settings.items() if k != "json"}
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in (self.machine | self.settings).items()), flush=True)

    def add(self, case: Row, contender: str, figures: Row) -> None:
        """Record one row."""
        if case != self.case:
            print("\n" + ", ".join(f"{k} {v}" for k, v in case.items()))
            self.case = case
        self.rows.append({**case, "contender": contender, **figures})
        print(f"  {contender:<24}" + "  ".join(f"{k} {v}" for k, v in readable(figures).items()), flush=True)
        if self.args.json:  # every time, so that a run that is cut off leaves what it has
            document = {"benchmark": self.name, "machine": self.machine, "settings": self.settings, "rows": self.rows}
            self.args.json.write_text(json.dumps(document, indent=1) + "\n")

    def compare(
        self, case: Row, contenders: Mapping[str, Contender], parts: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Row]:
        """Let the contenders take turns and record what each took; returns the figures by contender (of the last
        part).

        ``parts``: several figures from the same turns, each a weight for every phase; default: one, all phases
        together.
        """
        gc.collect()
        times: dict[str, list[list[float]]] = {name: [] for name in contenders}
        walls: dict[str, list[list[float]]] = {name: [] for name in contenders}
        failures: dict[str, str] = {}
        with ExitStack() as stack:
            turns = {name: stack.enter_context(closing(self.apart(each))) for name, each in contenders.items()}
            for repeat in range(-WARM_UP - 1, self.repeats):  # the first is to build
                for name in [name for name in contenders if name not in failures]:
                    taken = next(turns[name])
                    if isinstance(taken, str):
                        failures[name] = taken
                    elif repeat >= 0:
                        times[name].append(taken[0])
                        walls[name].append(taken[1])
        for name in failures:
            del times[name], walls[name]
        figures: dict[str, Row] = {}
        for part, weights in (parts or {"": None}).items():

            def weigh(phases, w=weights):
                return sum(phases) if w is None else sum(a * b for a, b in zip(phases, w, strict=True))

            weighed = [
                {name: [weigh(phases) for phases in taken] for name, taken in by_name.items()}
                for by_name in (times, walls)
            ]
            figures = summarise(next(iter(contenders)), *weighed) | {
                name: {"failed": failures[name]} for name in failures
            }
            for name in contenders:
                self.add({**case, "part": part} if part else case, name, figures[name])
        return figures

    def apart(self, contender: Contender) -> Generator[Turn | str]:
        """:meth:`turns`, where one CPU thread works those of a process of its own."""
        return in_process_of_its_own(self.turns(contender)) if self.on_one_thread else self.turns(contender)

    def turns(self, contender: Contender) -> Generator[Turn | str]:
        """Build the contender, and then take one turn after the other; the text of an error is the last that it
        gives."""
        try:
            phases = contender()
            yield [], []
            while True:
                yield self.turn(phases)
        except Exception as error:
            yield explain(error)

    def turn(self, phases: Sequence[Phase]) -> Turn:
        """Take one turn."""
        seconds, walls = [], []
        for phase in phases:
            self.synchronise()
            start, wall = self.clock(), time.perf_counter()
            phase()
            self.synchronise()
            seconds.append(self.clock() - start)
            walls.append(time.perf_counter() - wall)
        return seconds, walls

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, contender: Contender) -> int:
        """Most bytes that torch's allocator had given out during one warmed-up step, model and gradients included,
        inputs not."""
        gc.collect()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            phases = warmed_up(contender)
            torch.cuda.reset_peak_memory_stats()
            for phase in phases:
                phase()
            return torch.cuda.max_memory_allocated() - before
        # sees a block's end only if it saw its beginning
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            phases = warmed_up(contender)
            with record_function(MEASURED):
                for phase in phases:
                    phase()
        events = recorded.profiler.kineto_results.events()
        start = next(e.start_ns() for e in events if e.name() == MEASURED)
        live = peak = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            live += event.nbytes()
            if event.start_ns() >= start:
                peak = max(peak, live)
        return peak


def in_process_of_its_own(turns: Iterator[Turn | str]) -> Generator[Turn | str]:
    """The same turns, taken in a fork of this process, which ends with the iterator."""
    asks, answers = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(answers, turns), daemon=True)
    process.start()
    answers.close()
    try:
        while True:
            asks.send(None)
            yield asks.recv()
    except (EOFError, ConnectionError):
        process.join()
        yield f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _answer(pipe: Connection, turns: Iterator[Turn | str]) -> None:
    while True:
        pipe.recv()
        pipe.send(next(turns))


def warmed_up(contender: Contender) -> Sequence[Phase]:
    """Its phases after some steps, in which a model and its batches may be checked and buffers appear."""
    phases = contender()
    for _ in range(WARM_UP):
        for phase in phases:
            phase()
    return phases


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}"


def summarise(
    first: str, times: Mapping[str, Sequence[float]], walls: Mapping[str, Sequence[float]]
) -> dict[str, Row]:
    """Milliseconds and the ratio to the ``first`` contender, median and quartiles, from the seconds of every
    repeat."""
    figures = {}
    for name, seconds in times.items():
        figures[name] = spread("ms", [1e3 * s for s in seconds]) | {"wall_ms": 1e3 * statistics.median(walls[name])}
        if first in times:
            figures[name] |= spread("ratio", [a / b for a, b in zip(times[first], seconds, strict=True)])
            figures[name]["factor"] = 1 / figures[name]["ratio"]
    return figures


def spread(name: str, values: Sequence[float]) -> Row:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def readable(figures: Row) -> dict[str, str]:
    """Figures as text, quartiles in brackets behind their median."""
    text = {}
    for key, value in figures.items():
        if key.endswith(("_low", "_high")) and key.rsplit("_", 1)[0] in figures:
            continue
        text[key] = short(value)
        if f"{key}_low" in figures:
            text[key] += f" ({short(figures[f'{key}_low'])} to {short(figures[f'{key}_high'])})"
    return text


def short(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
        if abs(value) >= 100 or abs(value) < 0.1
        else f"{value:.2f}"
    )


def machine(device: torch.device) -> Row:
    """What the figures depend on: versions, hardware, date."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")),
            cpu,
        )
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "revision": git.stdout.strip(),
        "python": platform.python_version(),
        **versions,
        "cpu": cpu,
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if device.type == "cuda" else {}),
    }


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back between steps (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).

    It would be taken again page by page, which costs whoever frees more at once, not who computes more.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(-1, 2**31 - 1)
    mallopt(-3, 2**31 - 1)
