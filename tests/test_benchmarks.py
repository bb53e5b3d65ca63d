"""Every benchmark at its smallest size runs, nothing of ours fails, and the harness measures what it says."""

import gzip
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from transformers.utils import logging as transformers_logging

from benchmarks import harness, published, report
from benchmarks.scattering import scattering

pytestmark = pytest.mark.halved

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
    "quantised": ["--bases", "float32", "--width", "64", "--layers", "1", "--tokens", "8", "--batch", "2"],
    "layers": ["--layers", "linear", "embedding", "--batch-sizes", "4", "--memory"],
    "end_to_end": ["--networks", "mnist-cnn", "imdb-embedding", "--batch-sizes", "4"],
    "precision": ["--random", "--steps", "2", "--tunings", "lora"],
    "scaling": ["--base", "2", "8", "64", "1", "50", "2", "--dimensions", "rank"],
    "overhead": ["--width", "64", "--layers", "1", "--tokens", "8", "--physical", "4"],
    "noise": ["--parameters", "1", "--bands", "3", "--steps", "30", "--separation", "10"],
}  # fmt: skip
OURS = (
    "plain", "auto", "book_keeping", "ghost", "per_layer", "apart", "re-run", "Trainer", "DPTrainer auto", "TRL", "private auto", "fp32", "mixed",
    "bf16 body", "private", "with a memory budget",
)  # fmt: skip


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
    assert all(row["worst_error"] < 1e-5 for row in rows if row.get("part") == "exactness")
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


def test_peak_counts_what_is_held_and_what_is_freed_again(benchmark):
    def contender():
        held = torch.zeros(1000)

        def phase():
            torch.ones(3000) + torch.ones(3000)  # three at once
            return held

        return (phase,)

    assert benchmark.peak_bytes(contender) == 4 * (1000 + 3 * 3000)


def test_scattering_hears_a_wave_where_its_wavelet_is():
    """A plane wave is loudest in the channel of its scale and angle, and a flat image is its mean and nothing else."""
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    along = [rows * math.cos(a) + columns * math.sin(a) for a in ((3 - k) * math.pi / 8 for k in range(8))]
    waves = [torch.cos(0.75 * math.pi / 2**scale * u) for scale in range(2) for u in along]
    found = scattering(torch.stack([*waves, torch.full((28, 28), 0.5)])[:, None])
    assert found.shape == (17, 81, 7, 7)
    assert found[:16, 1:17, 2:5, 2:5].mean((2, 3)).argmax(1).tolist() == list(range(16))
    flat = torch.cat([torch.full((1, 7, 7), 0.5), torch.zeros(80, 7, 7)])
    torch.testing.assert_close(found[16], flat, rtol=0, atol=1e-6)


def test_published_settings_stay_within_one_budget(tmp_path, monkeypatch):
    """Their pieces on a few random images: the net's size, a mean that is counted, and rows that are not run again."""
    assert sum(p.numel() for p in published.conv_net(784).parameters()) == 26_010
    for part in ("train", "t10k"):
        for kind, size in (("images-idx3", 16 + 60 * 784), ("labels-idx1", 8 + 60)):
            content = gzip.compress(bytes(i * i % 10 for i in range(size)))
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    names = ["flat", "centred"]
    small = {name: replace(published.SETTINGS[name], batch=20, epochs=1, physical=30) for name in names}
    monkeypatch.setattr(published, "SETTINGS", small)
    for _ in range(2):
        published.main(["--data_dir", str(tmp_path), "--results", str(tmp_path / "rows.jsonl"), "--seeds", "1"])
    rows = published.read(tmp_path / "rows.jsonl")
    assert [row["setting"] for row in rows] == names
    assert all(2.95 < row["epsilon"] <= 3 for row in rows)
    x = published.features(tmp_path, "train")[0]
    mean, cost = published.private_mean(x)
    error = (mean - x.mean(0)).std() * len(x) / math.sqrt(3969)  # in units of what one image adds
    assert cost.epsilon(1e-5) < 0.25 and float(error) == pytest.approx(published.MEAN_NOISE, rel=0.1)
    assert published.spread([0.9, 0.92]) == "91.0 ± 1.4" and len(published.table(rows)) == 4
