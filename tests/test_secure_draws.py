"""With ``secure_rng`` who is drawn comes from ChaCha20, by the same distributions, in both loops."""

import signal
from itertools import islice

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from test_mechanism_in_loops import EXPECTED, LOOPS, N, by_engine, by_trainer, mechanism, step_through

from dp_transformers.mechanism import keystream, sampling
from dp_transformers.mechanism.keystream import chacha20, secure_generator
from dp_transformers.mechanism.sampling import (
    BallsInBinsSampling,
    CyclicPoissonSampling,
    DrawSampler,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    ScheduledPoissonSampling,
    TruncatedPoissonSampling,
)
from dp_transformers.mechanism.schedules import ConstantSchedule

EXAMPLES, BATCH = 40, 8
SCHEMES = [
    PoissonSampling(EXAMPLES, BATCH), ScheduledPoissonSampling(EXAMPLES, BATCH, ConstantSchedule()),
    TruncatedPoissonSampling(EXAMPLES, BATCH, EXAMPLES), CyclicPoissonSampling(EXAMPLES, 4, min_separation=5), RandomAllocationSampling(EXAMPLES, 5),
    BallsInBinsSampling(EXAMPLES, 5), FixedOrderSampling(EXAMPLES, BATCH),
]  # fmt: skip


def words(generator, count):
    return generator.integers(0, 2**64 - 1, count, dtype=np.uint64, endpoint=True)


def test_its_bits_are_the_keystream():
    """Checked against ChaCha20 of RFC 8439, whose key and counter are zeros in appendix A.1."""
    zeros = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), mode=None).encryptor().update(bytes(64))
    assert zeros.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28") and zeros.hex().endswith("c387b669b2ee6586")
    stream = np.frombuffer(chacha20([5, 6])(bytes(8 * 3000)), "<u8")
    generator = secure_generator([5, 6])
    assert (words(generator, 1000) == stream[:1000]).all()
    assert (generator.random(1000) == (stream[1000:2000] >> np.uint64(11)) * 2.0**-53).all()
    halves = generator.integers(0, 2**32 - 1, 1000, dtype=np.uint32, endpoint=True)
    assert (halves == (stream[2000:] & np.uint64(2**32 - 1))).all()
    assert not set(words(secure_generator([5, 7]), 1000)) & set(stream)


def test_a_key_that_is_used_up_is_followed_by_another(monkeypatch):
    """What raises in NumPy's functions would be lost there, and draws would go on with zeros."""
    whole = np.frombuffer(chacha20([5])(bytes(2 * 4096)), "<u8")
    monkeypatch.setattr(keystream, "_STREAM", 2 * 4096)
    generator, pieces = secure_generator([5]), chacha20([5])
    drawn = words(generator, 4000)
    assert (drawn[:1024] == whole).all() and len(set(drawn)) == 4000
    assert (drawn[:3072] == np.frombuffer(b"".join(pieces(bytes(4096)) for _ in range(6)), "<u8")).all()
    others = [words(secure_generator(entropy), 1024) for entropy in ([5, 1], [5, 2])]
    assert not set(drawn[1024:]) & set(np.concatenate(others))


def inclusions(scheme, generator, runs, steps):
    """Which example took part in which step, of several runs: (runs, steps, examples)."""
    taken = np.zeros((runs, steps, EXAMPLES), bool)
    for run in range(runs):
        for step, draw in enumerate(islice(scheme.draws(generator, 0), steps)):
            assert len(set(draw.tolist())) == len(draw)
            taken[run, step, draw] = True
    return taken


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)
def test_examples_and_pairs_are_drawn_as_often_as_the_scheme_says(scheme):
    """Each example, and each pair, in each of five steps, to 5.5 standard errors; with that many runs, a probability
    that is off by 0.05 for one example would show."""
    runs, steps = 2000, 5
    taken = inclusions(scheme, secure_generator([1, 2]), runs, steps)
    q = scheme.sample_rate
    assert np.abs(taken.mean(0) - q).max() < 5.5 * (q * (1 - q) / runs) ** 0.5
    together = q * (BATCH - 1) / (EXAMPLES - 1) if scheme.kind == "fixed_order" else q * q
    if scheme.kind == "cyclic_poisson":
        together = (1 / 5) ** 2 * scheme.rate_in_group**2
    pairs = np.einsum("rsi,rsj->sij", taken, taken, dtype=float) / runs
    apart = ~np.eye(EXAMPLES, dtype=bool)
    assert np.abs(pairs[:, apart] - together).max() < 5.5 * (together * (1 - together) / runs) ** 0.5
    counts = taken.sum(1)
    if scheme.kind in ("random_allocation", "balls_in_bins", "fixed_order"):
        assert (counts == 1).all()
    elif scheme.kind == "cyclic_poisson":
        assert counts.max() == 1
    else:  # independent steps
        assert abs(counts.var() - steps * q * (1 - q)) < 0.03


def test_a_cap_keeps_a_uniform_subset():
    taken = inclusions(TruncatedPoissonSampling(EXAMPLES, BATCH, 6), secure_generator([3]), 1, 6000)[0]
    assert taken.sum(1).max() == 6
    rate = taken.mean()
    assert rate < BATCH / EXAMPLES and np.abs(taken.mean(0) - rate).max() < 5.5 * (rate * (1 - rate) / 6000) ** 0.5


def test_ranks_draw_alike_and_runs_do_not():
    def drawn(secret, secure, rank=0, world=1):
        return [draw.indices for [draw] in DrawSampler(SCHEMES[0], 20, secret, rank, world, secure=secure)]

    whole = drawn(7, True)
    shares = [drawn(7, True, rank, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(draw) for draw in whole]
    assert whole == drawn(7, True) != drawn(8, True) and whole != drawn(7, False)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("secure", [False, True])
def test_both_loops_draw_as_they_are_told(tmp_path, monkeypatch, loop, secure):
    made = []
    monkeypatch.setattr(
        sampling, "secure_generator", lambda entropy: made.append(entropy) or secure_generator(entropy)
    )
    if loop == "trainer":
        trainer = by_trainer(tmp_path, mechanism(steps=2), secure_rng=secure, save_strategy="no")
        trainer.train()
        assert trainer.privacy_spent().steps == 2
    else:
        engine, *loop = by_engine(mechanism(), secure=secure)
        step_through(*loop, N // EXPECTED)
        assert engine.steps == N // EXPECTED
        engine.detach()
    assert len(made) == secure


def test_an_interrupt_makes_no_number():
    """In a function that NumPy calls, an exception would be lost, and a 0 returned in the place of random bits."""
    generator, interrupts = secure_generator([9]), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(8):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-3)
                words(generator, 100_000)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 3
    calls = np.frombuffer(chacha20([9])(bytes(9 * 8 * 100_000)), "<u8").reshape(9, 100_000)
    assert (calls[:, :1000] == words(generator, 1000)).all(1).any(), "each call took all of its numbers, or none"
