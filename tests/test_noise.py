"""The Gaussian mechanism: variance, shape, independence; who can and who cannot reproduce it."""

import hashlib
import os
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy import stats

from dp_transformers.noise import generators
from dp_transformers.noise.generators import GaussianNoise, _chacha20, standard_normal
from dp_transformers.runtime.randomness import (
    _TWISTER,
    SecretSeeds,
    forked_generators,
    seed_worker,
    seeded_global_generators,
)

pytestmark = pytest.mark.whole


def noise(shapes, std, **options):
    tensors = [torch.zeros(s) for s in shapes]
    GaussianNoise(**options).add_(tensors, std)
    return tensors


@pytest.mark.parametrize("secure", [False, True])
def test_distribution(secure):
    n, std = 400_000, 0.37
    a, b = noise([(n,), (n // 2, 2)], std, secure=secure)
    for x in (a, b.flatten()):
        x = x.double().numpy() / std
        assert stats.kstest(x, "norm").pvalue > 1e-4
        assert 1e-4 < stats.chi2.cdf((x**2).sum(), n) < 1 - 1e-4
        assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(a.numpy(), b.flatten().numpy())[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize("secure", [False, True])
def test_tails_and_pairs(secure):
    """As many numbers far out as there should be; nothing left in common by the two that come from the same random
    bits."""
    x = noise([(4_000_000,)], 1.0, secure=secure)[0]
    for bound in (3.5, 4.0, 4.5):
        expected = 2 * stats.norm.sf(bound) * len(x)
        assert abs(int((x.abs() > bound).sum()) - expected) < 5 * expected**0.5
    for chunk in x[:1_000_000].split(2**16):
        a, b = chunk.tensor_split(2)
        for f in (torch.Tensor.sign, torch.abs, torch.square):
            pair = torch.stack([f(a[: len(b)]), f(b)])
            assert abs(torch.corrcoef(pair)[0, 1]) < 5 / len(b) ** 0.5


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_number(dtype, secure):
    """Numbers in bf16 would leave the low bits of a float32 sum as they are."""
    expected = noise([(1000,)], 1.0, secure=secure, entropy=[3])[0]
    numbers = torch.zeros(1000)
    try:
        torch.set_default_dtype(dtype)
        GaussianNoise(secure=secure, entropy=[3]).add_([numbers], 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(numbers, expected) and len(numbers.unique()) > 990


def test_secure_numbers_are_sums_of_four_draws():
    """Of the same keystream, in the order in which it comes."""
    entropy, numbers = [1, 2], torch.zeros(100_001)
    GaussianNoise(secure=True, entropy=entropy).add_([numbers], 2.0)
    bits, expected = _chacha20(entropy), []
    for chunk in numbers.split(2**16):
        expected.append(sum(standard_normal(bits, len(chunk)) for _ in range(4)))
    assert torch.equal(numbers, torch.cat(expected))  # halved, and times 2


def test_a_key_is_all_that_secure_numbers_come_from():
    """The first block of ChaCha20 (RFC 8439) with the key that is made of the entropy."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key = hashlib.sha256(b"[5]").digest()
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(64))
    assert _chacha20([5])(8).numpy().tobytes() == stream


@pytest.mark.parametrize("word", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_any_random_bits_give_finite_numbers_and_the_longest_tail(word):
    x = standard_normal(lambda count: torch.full((count,), word), 7)
    assert x.isfinite().all() and len(x) == 7
    if word in (0, 1):  # every bit counts
        assert x.max() == pytest.approx((-2 * np.log((word + 0.5) * 2.0**-63)) ** 0.5)


@pytest.mark.parametrize("secure", [False, True])
def test_small_tensors_that_are_drawn_together_share_no_number(secure):
    tensors = [
        torch.full(shape, 7.0, dtype=dtype)
        for shape in [(3,), (), (0, 2), (2**15, 2), (5, 4), (2**16 - 1,), (2,)]
        for dtype in (torch.float32, torch.float64)
    ]
    GaussianNoise(secure=secure).add_(iter(tensors), 0.5)
    numbers = torch.cat([(t.flatten().double() - 7) / 0.5 for t in tensors])
    assert len(numbers) == sum(t.numel() for t in tensors)
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
    exact = torch.cat([(t.flatten() - 7) / 0.5 for t in tensors if t.dtype == torch.float64])
    assert len(exact.unique()) > 0.998 * len(exact)  # of so many float32 normal numbers 0.9991 are unique


@pytest.mark.filterwarnings("ignore:dp_seed")
@pytest.mark.parametrize("layout", ["in order", "transposed"])
def test_noise_of_a_large_tensor_is_added_in_pieces(monkeypatch, layout):
    """The same numbers, without ever being in memory all at once."""
    monkeypatch.setattr(generators, "_PIECE", 2**17)
    drawn = []
    draw = GaussianNoise._numbers
    monkeypatch.setattr(
        GaussianNoise, "_numbers", lambda self, count, *rest: drawn.append(count) or draw(self, count, *rest)
    )
    tensors = [torch.zeros(5), torch.zeros(2**9, 2**9 + 1), torch.zeros(7)]
    if layout == "transposed":
        tensors[1] = tensors[1].T
    GaussianNoise(dp_seed=3).add_(tensors, 1.0)
    assert drawn == ([5, 2**17, 2**17, 2**9 + 7] if layout == "in order" else [5, 2**9 * (2**9 + 1), 7])
    whole = GaussianNoise(dp_seed=3)
    first, second = (draw(whole, count, torch.device("cpu")) for count in (5, 2**18))
    assert torch.equal(tensors[0], first) and torch.equal(tensors[1].reshape(-1)[: 2**18], second)


@pytest.mark.parametrize("secure", [False, True])
def test_no_public_seed_reproduces_it(secure):
    runs = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        runs.append(noise([(50,)], 1.0, secure=secure)[0])
    assert not torch.equal(*runs)


def test_successive_draws_differ_and_the_global_state_is_left_alone():
    source = GaussianNoise()
    state = torch.random.get_rng_state()
    x, y = torch.zeros(50), torch.zeros(50)
    source.add_([x], 1.0)
    source.add_([y], 1.0)
    assert not torch.equal(x, y)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_dp_seed_is_reproducible_and_says_so():
    with pytest.warns(UserWarning, match="NOT private"):
        a = noise([(5,)], 1.0, dp_seed=3)[0]
    with pytest.warns(UserWarning, match="NOT private"):
        b = noise([(5,)], 1.0, dp_seed=3)[0]
    assert torch.equal(a, b)


def test_it_is_added():
    x = torch.full((100_000,), 5.0)
    GaussianNoise().add_([x], 2.0)
    assert abs(x.mean() - 5) < 0.05
    GaussianNoise().add_([y := torch.ones(3)], 0)
    assert torch.equal(y, torch.ones(3))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (), (1,), (3, 1)])
def test_any_shape(shape, secure):
    """Also nothing: a shard of a parameter with fewer rows than there are ranks."""
    x = noise([shape], 1.0, secure=secure)[0]
    assert x.shape == shape and x.isfinite().all() and (x != 0).all()


def test_a_forked_process_does_not_draw_the_same():
    source = GaussianNoise()
    child = os.fork()
    if child == 0:
        try:
            source.add_([torch.zeros(1)], 1.0)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    source.add_([torch.zeros(1)], 1.0)


def test_misuse():
    with pytest.raises(TypeError, match="bfloat16"):
        GaussianNoise().add_([torch.zeros(3, dtype=torch.bfloat16)], 1.0)
    with pytest.raises(ValueError, match="contradict"):
        GaussianNoise(dp_seed=1, secure=True)


@pytest.mark.parametrize("secure", [False, True])
def test_equal_entropy_gives_equal_noise_and_no_other_does(secure):
    """Replicas of a shard add the same numbers; what is drawn from the operating system is never the same."""

    def drawn(entropy):
        noise = [torch.zeros(1000), torch.zeros(7)]
        GaussianNoise(secure=secure, entropy=entropy).add_(noise, 1.0)
        return torch.cat(noise)

    assert torch.equal(drawn([3, 4]), drawn([3, 4]))
    for other in ([4, 3], [3], None):
        assert abs(torch.corrcoef(torch.stack([drawn([3, 4]), drawn(other)]))[0, 1]) < 5 / 1000**0.5
    assert not torch.equal(drawn(None), drawn(None))


@pytest.mark.parametrize("seeded", [lambda device: seeded_global_generators([1], device), forked_generators])
def test_every_device_gets_its_random_numbers_back(seeded, monkeypatch):
    """torch.manual_seed seeds all: of a model that lies on two, dropout on the other would go on from a seed that is
    known."""
    forked = []
    with torch.random.fork_rng(devices=[]):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(
            torch.random,
            "fork_rng",
            lambda devices, device_type: forked.append((device_type, *devices)) or nullcontext(),
        )
        with seeded(torch.device("cuda:1")):
            pass
    assert forked == [("cuda", 0, 1)]


def test_where_torch_keeps_the_words_of_its_generator():
    """Its own seeding writes the seed itself into the first, and there is nothing after the last."""
    state = torch.Generator().manual_seed(1234).get_state().view(torch.int64)
    assert state[_TWISTER][0] == 1234 and (state[_TWISTER] > 0).all() and not state[_TWISTER.stop :].any()


@pytest.mark.parametrize("seeded", ["training", "loop", "worker"])
def test_masks_are_no_function_of_32_bits(seeded):
    """torch's CPU generator looks at no more of a seed, and so few can all be tried."""
    entropy, drawn, states = [5, 5 + 2**32], [], []
    with torch.random.fork_rng():
        for k in range(2):
            torch.manual_seed(entropy[k])
            if seeded == "loop":
                SecretSeeds(entropy[k]).reseed()
            elif seeded == "worker":
                seed_worker(0)
            with (
                nullcontext() if seeded != "training" else seeded_global_generators([entropy[k]], torch.device("cpu"))
            ):
                states.append(torch.get_rng_state())
                drawn.append((torch.rand(4).tolist(), random.random(), np.random.rand()))
                seed = torch.initial_seed()
                torch.manual_seed(seed)  # as somebody who tries all of them would
                assert torch.rand(4).tolist() != drawn[-1][0]
    assert all(a != b for a, b in zip(*drawn, strict=True))
    words = torch.stack([state.view(torch.int64)[_TWISTER] for state in states])
    assert (words[0] != words[1]).sum() > 600 and words.max() < 2**32
    assert words.double().mean() == pytest.approx(2**31, rel=0.1)


def test_the_generator_runs_as_well_from_such_a_state():
    with seeded_global_generators([1], torch.device("cpu")):
        numbers = torch.rand(10**6, dtype=torch.float64)
        assert not torch.equal(torch.rand(3), torch.rand(3))
    assert numbers.mean() == pytest.approx(0.5, abs=2e-3) and numbers.var() == pytest.approx(1 / 12, rel=1e-2)
    with seeded_global_generators([1], torch.device("cpu")):
        assert torch.equal(torch.rand(10**6, dtype=torch.float64), numbers)
