"""Every benchmark at its smallest size: that it runs, that nothing of ours fails, and that the harness measures what
it says."""

import json
import os
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from benchmarks import harness, report, scaling
from benchmarks.memory import peak_and_growth
from benchmarks.models import KINDS, NETWORKS, Shape, build_transformer, transformer_losses

TINY = ["--width", "64", "--layers", "1", "--vocabulary", "50"]
SMALLEST = {
    "throughput": [*TINY, "--models", "llama-lora", "--lengths", "8", "--tokens-per-batch", "32", "--dtypes", "bf16",
                   "--modes", "auto", "book_keeping", "ghost", "per_layer"],
    "gpu": ["--toy", "--models", "bert-base", "llama-1b-lora", "--dtypes", "fp32", "--modes", "auto"],
    "memory": [*TINY, "--models", "gpt2", "--lengths", "8", "--tokens-per-batch", "64", "--modes", "auto"],
    "budget": [*TINY, "--tokens", "16", "--batch", "2", "--budgets", "0.5", "--settings", "1"],
    "trainer": [*TINY, "--tokens", "8", "--physical", "2", "--logical", "4", "--steps", "3", "--models", "bert"],
    "trl": [*TINY, "--tokens", "8", "--shortest", "4", "--physical", "2", "--logical", "4", "--steps", "3", "--models", "llama-lora"],
    "apart": ["--models", "cohere", "--width", "128", "--layers", "1", "--tokens", "8", "--batch", "2"],
    "layers": ["--layers", "linear", "embedding", "--batch-sizes", "4", "--memory"],
    "end_to_end": ["--networks", "mnist-cnn", "imdb-embedding", "--batch-sizes", "4"],
    "precision": ["--random", "--steps", "2", "--tunings", "lora"],
    "scaling": ["--base", "2", "8", "64", "1", "50", "2", "--dimensions", "rank"],
    "overhead": ["--width", "64", "--layers", "1", "--tokens", "8", "--physical", "4"],
    "noise": ["--parameters", "1", "--bands", "3", "--steps", "30", "--separation", "10"],
}  # fmt: skip
OURS = (
    "plain",
    "auto",
    "book_keeping",
    "ghost",
    "per_layer",
    "apart",
    "re-run",
    "Trainer",
    "DPTrainer auto",
    "TRL",
    "private auto",
    "fp32",
    "mixed",
    "bf16 body",
)


@pytest.fixture(autouse=True)
def _undo_settings():
    """Benchmarks set these for their process."""
    verbosity, threads = transformers_logging.get_verbosity(), torch.get_num_threads()
    yield
    transformers_logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def run(name, tmp_path, *options):
    path = tmp_path / f"{name}.json"
    common = ["--repeats", "1", "--allocator", "default", "--json", str(path)]
    import_module(f"benchmarks.{name}").main([*common, *SMALLEST[name], *options])
    return path, json.loads(path.read_text())["rows"]


def test_what_noise_keeps(tmp_path):
    """Bytes for each parameter: of all bands but one, of each buffer, and nothing where noise is drawn again."""
    _, rows = run("noise", tmp_path)
    kept = {row["contender"]: row["bytes_per_parameter"] for row in rows if row.get("part") == "kept"}
    assert kept == {"independent": 0, "secure_rng": 0, "banded 3": 8, "lambda": 0, "BISR 4": 0, "BLT 3": 12}


@pytest.mark.parametrize("name", SMALLEST)
def test_every_benchmark_runs_and_reports(name, tmp_path):
    path, rows = run(name, tmp_path, "--no-peers")
    assert not [row for row in rows if row["contender"] in OURS and "failed" in row]
    assert all(
        row["ratio"] == 1 for row in rows if row["contender"] in ("plain", "Trainer", "TRL", "fp32") and "ratio" in row
    )
    report.main([str(path), "--output", str(tmp_path / "RESULTS.md")])
    cells = [
        cell for line in (tmp_path / "RESULTS.md").read_text().splitlines() for cell in line.strip("| ").split(" | ")
    ]
    for row in rows:  # each is in some cell
        shown = harness.readable(
            {k: v for k, v in row.items() if k in ("ms", "ratio", "peak_mb", "accuracy", "exponent")}
        )
        shown = [text.split(" (")[0] for name, text in shown.items() if row[name] != 1]
        assert row["contender"] in cells
        assert any(all(text in cell for text in shown) for cell in cells) or all(text in cells for text in shown)


def test_peers_that_are_installed_can_do_the_networks(tmp_path):
    _, rows = run("end_to_end", tmp_path)
    peers = [row for row in rows if row["contender"] in ("opacus hooks", "jax")]
    assert len(peers) >= 4
    assert not [row for row in peers if not row.get("failed", "ModuleNotFoundError").startswith("ModuleNotFoundError")]


@pytest.fixture
def benchmark():
    return harness.Benchmark("test", harness.parser("test").parse_args(["--repeats", "3", "--allocator", "default"]))


def test_ratio_is_first_over_this_and_parts_weigh_the_phases(benchmark):
    now = [0.0]
    benchmark.clock = lambda: now[0]

    def takes(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    figures = benchmark.compare(
        {}, {"a": lambda: (takes(1), takes(3)), "b": lambda: (takes(2), takes(4))}, {"second": (0, 1), "both": (2, 1)}
    )
    assert figures["b"]["ms"] == pytest.approx(8000) and figures["b"]["ratio"] == pytest.approx(5 / 8)
    assert [row["ratio"] for row in benchmark.rows] == pytest.approx([1, 3 / 4, 1, 5 / 8])


def test_a_contender_that_fails_is_a_result(benchmark):
    def cannot():
        raise RuntimeError("no\nsecond line")

    figures = benchmark.compare(
        {}, {"a": lambda: (lambda: None,), "builds not": cannot, "runs not": lambda: (cannot,)}
    )
    assert [figures[name].get("failed") for name in figures] == [None, "RuntimeError: no", "RuntimeError: no"]


def test_on_one_thread_each_contender_has_a_process_of_its_own(benchmark, tmp_path):
    def writes(name):
        def contender():
            (tmp_path / name).write_text(str(os.getpid()))
            return (lambda: time.sleep(0.01),)

        return contender

    figures = benchmark.compare(
        {}, {"a": writes("a"), "b": writes("b"), "dies": lambda: (lambda: os.kill(os.getpid(), signal.SIGKILL),)}
    )
    assert figures["dies"] == {"failed": "its process ended with exit code -9"}
    assert figures["b"]["wall_ms"] >= 10
    ids = {int((tmp_path / name).read_text()) for name in "ab"}
    assert len(ids | {os.getpid()}) == 3
    assert not any(Path(f"/proc/{i}").exists() for i in ids)


def test_no_two_take_their_turns_at_once(benchmark, tmp_path):
    seen = tmp_path / "seen"

    def tells(name):
        def phase():
            with seen.open("a") as file:
                file.write(f"{name} begins\n")
                file.flush()
                time.sleep(0.02)
                file.write(f"{name} ends\n")

        return lambda: (phase,)

    benchmark.compare({}, {"a": tells("a"), "b": tells("b")})
    in_turn = ["a begins", "a ends", "b begins", "b ends"]
    assert seen.read_text().splitlines() == in_turn * (3 + harness.WARM_UP)


def test_on_several_threads_they_take_turns_here(benchmark):
    benchmark.on_one_thread, seen = False, []
    benchmark.compare({}, {"a": lambda: (lambda: seen.append("a"),), "b": lambda: (lambda: seen.append("b"),)})
    assert seen == ["a", "b"] * (3 + harness.WARM_UP)


def test_peak_counts_what_is_held_and_what_is_freed_again(benchmark):
    def contender():
        held = torch.zeros(1000)

        def phase():
            torch.ones(3000) + torch.ones(3000)  # three at once
            return held

        return (phase,)

    assert benchmark.peak_bytes(contender) == 4 * (1000 + 3 * 3000)


def test_the_largest_batch_follows_from_batches_in_which_activations_dominate():
    measured = []

    def peak_bytes(size):  # of weights, and the gradients of all of them or the activations of all examples
        measured.append(size)
        return 1000 + max(1000 + 30 * size, 100 * size)

    figures = peak_and_growth(peak_bytes, 4, 10_000)
    assert measured == [4, 8, 16, 32, 64]
    assert figures == {"peak_mb": pytest.approx(2240e-6), "per_example_mb": pytest.approx(1e-4), "largest_batch": 90}
    assert peak_bytes(90) <= 10_000 < peak_bytes(91)


def test_no_largest_batch_where_the_budget_is_full_before():
    assert peak_and_growth(lambda size: 900 + size, 4, 910) == {"peak_mb": pytest.approx(908e-6)}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_parameter_counts_of_the_paper(name):
    network = NETWORKS[name]
    x, y = network.batch(3, torch.device("cpu"))
    assert network()(x).shape == (3, network.classes) and y.shape == (3,)  # building asserts the count


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind}-lora" for kind in KINDS)])
def test_transformers_give_one_loss_for_each_example(kind):
    shape = Shape(width=64, layers=1, vocabulary=50, tokens=9, size=3, rank=2)
    model = build_transformer(kind, shape)
    assert transformer_losses(kind, shape, torch.device("cpu"))(model).shape == (3,)
    assert all(p.requires_grad == (not kind.endswith("-lora") or "lora_" in n) for n, p in model.named_parameters())


def test_formulas_of_scaling():
    shape = Shape(width=64, layers=1, vocabulary=50, tokens=8, size=2)
    plain = scaling.operations(shape, "plain", lora=False)
    weights = sum(
        p.numel() for n, p in build_transformer("llama", shape).named_parameters() if p.dim() == 2 and "embed" not in n
    )
    assert plain == 2 * (6 * 8 * weights + 3 * 4 * 64 * 64)
    assert scaling.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
