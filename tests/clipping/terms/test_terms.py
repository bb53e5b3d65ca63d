"""The term algebra against gradients that are written out, over drawn shapes."""

import inspect
import weakref
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_transformers.clipping.coefficients import ParameterGroup
from dp_transformers.clipping.modes import KeptTerms
from dp_transformers.clipping.norms import SPLIT_ROUNDING
from dp_transformers.clipping.recorded_call import ForwardPass
from dp_transformers.clipping.terms import (
    Convolution,
    Convolved,
    Dense,
    GradientTerm,
    LastResultCache,
    NormOnly,
    Outer,
    Routed,
    Rows,
    Stacked,
    arithmetic,
    gram,
)
from dp_transformers.clipping.terms.gram import gram_of
from dp_transformers.clipping.terms.tied_weights import merge, norm_of_sum
from dp_transformers.clipping.trainable import TrainableParameters

pytestmark = pytest.mark.whole

sizes = st.integers(1, 9)


def written_out(term, rows, columns):
    if isinstance(term, Dense):
        return term.grad.double()
    if isinstance(term, Outer):
        return torch.einsum("btp,btd->bpd", term.left.double(), term.right.double())
    if isinstance(term, Stacked):
        return torch.cat([written_out(block, rows, columns) for block in term.blocks], 1)
    total = torch.zeros(len(term.ids), rows, columns, dtype=torch.float64)
    for b in range(len(term.ids)):
        for t in range(term.ids.shape[1]):
            total[b, term.ids[b, t]] += term.grad[b, t].double()
    return total


def stacked(b, t, rows, columns, g):
    """Blocks of any number of rows, each with a length of its own."""
    cuts = sorted({0, rows, *torch.randint(0, rows + 1, (2,), generator=g).tolist()})
    blocks = [(end - start, t + i) for i, (start, end) in enumerate(pairwise(cuts))]
    return Stacked(
        [Outer(torch.randn(b, t, p, generator=g), torch.randn(b, t, columns, generator=g)) for p, t in blocks]
    )


@settings(max_examples=60, deadline=None)
@given(b=st.integers(0, 4), rows=st.integers(1, 20), columns=sizes, lengths=st.lists(st.tuples(st.sampled_from("ORDS"), sizes), min_size=1, max_size=4),
       seed=st.integers(0, 10**6), instantiate=st.booleans())  # fmt: skip
def test_norm_and_sum_of_any_mixture(b, rows, columns, lengths, seed, instantiate):
    g = torch.Generator().manual_seed(seed)
    made = {
        "O": lambda t: Outer(torch.randn(b, t, rows, generator=g), torch.randn(b, t, columns, generator=g)),
        "R": lambda t: Rows(
            torch.randint(0, rows, (b, t), generator=g), torch.randn(b, t, columns, generator=g), rows
        ),
        "S": lambda t: stacked(b, t, rows, columns, g),
        "D": lambda t: Dense(torch.randn(b, rows, columns, generator=g)),
    }
    terms = [made[kind](t) for kind, t in lengths]
    exact = sum(written_out(t, rows, columns) for t in terms)
    norm_sq = norm_of_sum(terms, instantiate=instantiate, cache=LastResultCache()).squared()
    scale = sum(
        written_out(t, rows, columns).flatten(1).norm(dim=1) for t in terms
    ).square()  # what rounding is relative to
    assert norm_sq.dtype == torch.float32
    assert norm_sq.shape == (b,)
    assert ((norm_sq.double() - exact.flatten(1).square().sum(1)).abs() <= 1e-5 * scale + 1e-12).all()
    coef = torch.rand(b, generator=g)
    total = (
        sum(t.weighted_sum(coef, LastResultCache()).double() for t in merge(terms))
        if b
        else torch.zeros(rows, columns).double()
    )
    expected = torch.einsum("b,bpd->pd", coef.double(), exact)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 4), rows=sizes, columns=sizes, t=st.integers(1, 40), seed=st.integers(0, 10**6), both=st.booleans(),
       kind=st.sampled_from(["outer", "stacked", "routed"]), instantiate=st.booleans())  # fmt: skip
def test_factors_in_bf16_are_multiplied_without_further_rounding(b, rows, columns, t, seed, both, kind, instantiate):
    """Where one is, autocast had rounded the other. Sums may miss 2⁻¹⁷ of every part, because coefficients are no bf16
    numbers."""
    g, e = torch.Generator().manual_seed(seed), 3

    def outer(p, t):
        right = torch.randn(b, t, columns, generator=g)
        return Outer(torch.randn(b, t, p, generator=g).bfloat16(), right.bfloat16() if both else right)

    if kind == "stacked":
        term = Stacked([outer(rows, t), outer(rows + 1, t)])
        rounded = [(block.left.double(), block.right.bfloat16().double()) for block in term.blocks]
        exact, reach = (
            torch.cat([f(left).mT @ f(right) for left, right in rounded], 1) for f in (torch.clone, torch.abs)
        )
    else:
        term = outer(rows, t)
        left, right = term.left.double(), term.right.bfloat16().double()
        exact, reach = left.mT @ right, left.abs().mT @ right.abs()
    if kind == "routed":
        ids = torch.randint(0, e, (b, t), generator=g)
        term = Routed(ids, term.left, term.right, e)
        exact, reach = (
            torch.einsum("bse,bsp,bsd->bepd", F.one_hot(ids, e).double(), f(left), f(right))
            for f in (torch.clone, torch.abs)
        )
    norm_sq, scale = (norm_of_sum([term], instantiate=instantiate, cache=LastResultCache()).squared(), reach.flatten(1).square().sum(1))  # fmt: skip
    assert ((norm_sq.double() - exact.flatten(1).square().sum(1)).abs() <= 2e-6 * scale).all()
    instance = term.instantiate().grad.double().view_as(exact)
    assert ((instance - exact).abs() <= 1e-6 * reach).all()
    coef = torch.rand(b, generator=g)
    total = term.weighted_sum(coef, LastResultCache()).double()
    expected, within = (torch.einsum("b,b...->...", coef.double(), x) for x in (exact, reach))
    assert ((total - expected).abs() <= (SPLIT_ROUNDING + 1e-6) * within).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("positions", [1, 127, 128, 129, 302])
def test_inner_products_of_many_positions_are_formed_on_one_side_of_the_diagonal(positions, bf16):
    g = torch.Generator().manual_seed(positions)
    factors = [torch.randn(2, positions, width, generator=g) for width in (40, 24)]
    grams = [gram_of(x, bf16=bf16) for x in factors]
    rounded = [x.bfloat16().double() if bf16 else x.double() for x in factors]
    expected = [x @ x.mT for x in rounded]
    for found, whole in zip(grams, expected, strict=True):
        starts = [0, *accumulate(column.shape[2] for column in found.columns)]
        assert len(found.columns) == (4 if positions >= 128 else 1) and starts[-1] == positions
        for column, (start, end) in zip(found.columns, pairwise(starts), strict=True):
            torch.testing.assert_close(column.double(), whole[:, start:, start:end], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found.lengths_bt.double(), whole.diagonal(dim1=1, dim2=2).sqrt(), rtol=1e-6, atol=0)
    value, reach = (expected[0] * expected[1]).sum((1, 2)), (expected[0] * expected[1]).abs().sum((1, 2))
    assert ((grams[0].inner_product(grams[1]).value.double() - value).abs() <= 2e-6 * reach).all()


@pytest.mark.parametrize(("device", "positions", "products"), [("cpu", 128, 4), ("meta", 128, 1), ("meta", 256, 4)])
def test_an_accelerator_is_given_larger_products(device, positions, products, monkeypatch):
    seen, product = [], gram.product
    monkeypatch.setattr(gram, "product", lambda *factors, bf16: seen.append(1) or product(*factors, bf16=bf16))
    gram_of(torch.ones(2, positions, 8, device=device))
    assert len(seen) == products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_slots_of_an_expert_that_cancel(dtype):
    """The sum of one example, clipped by the norm that was measured, is no longer than the bound."""
    g, slots, bound = torch.Generator().manual_seed(0), 512, 1e-3
    left = torch.where(torch.arange(slots) < slots // 4, 3.0, -1.0)[:, None] * torch.randint(1, 8, (16,), generator=g)
    term = Routed(torch.zeros(1, slots, dtype=torch.long), left[None].to(dtype), torch.randn(1, 1, 32, generator=g).expand(1, slots, 32).to(dtype), 64)  # fmt: skip
    layer = torch.nn.Linear(1, 1, bias=False)
    forward = ForwardPass(1, torch.zeros(1), TrainableParameters(layer))
    forward.uses[layer.weight] = 1
    backward = KeptTerms(forward, [ParameterGroup([layer.weight])], None, None)
    backward.add(layer.weight, term)
    (group,) = backward._groups
    norm_b = backward.squared_norms(group.norms).sqrt()
    (kept,) = group.terms[layer.weight]
    assert kept.weighted_sum((bound / norm_b).clamp(max=1), LastResultCache()).norm() <= bound * (1 + 1e-5)


def test_tied_factors_of_which_one_is_bf16():
    ids = torch.arange(8)[None]
    left = 1.0039 * torch.eye(40)[None, :8]
    terms = [Outer(left, torch.ones(1, 8, 50).bfloat16()), Rows(ids, -0.98 * torch.ones(1, 8, 50), 40)]
    norm_b, cache = norm_of_sum(terms).squared().sqrt(), LastResultCache()
    total = sum(t.weighted_sum(torch.ones(1), cache) for t in terms)
    assert total.norm() <= norm_b * (1 + 1e-5)


def test_chunks_change_nothing(monkeypatch):
    torch.manual_seed(0)
    terms = [
        Outer(torch.randn(7, 5, 40), torch.randn(7, 5, 40)),
        Outer(torch.randn(7, 50, 6), torch.randn(7, 50, 7)),
        Rows(torch.randint(0, 4, (7, 9)), torch.randn(7, 9, 3), 4),
    ]
    tied = [Outer(torch.randn(7, 5, 4), torch.randn(7, 5, 3)), terms[2]]
    whole = [t.norm(instantiate=i).squared() for t in terms for i in (False, True)] + [norm_of_sum(tied).squared()]
    monkeypatch.setattr(arithmetic, "SCRATCH_BYTES", 600)
    parts = [t.norm(instantiate=i).squared() for t in terms for i in (False, True)] + [norm_of_sum(tied).squared()]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_memo_does_not_mistake_one_tensor_for_another():
    cache, calls = LastResultCache(), []

    def double(x):
        calls.append(1)
        return x * 2

    x = torch.randn(4, 6)
    assert torch.equal(cache.get("k", x, double), x * 2)
    assert torch.equal(cache.get("k", x.detach(), double), x * 2)
    assert len(calls) == 1
    assert torch.equal(cache.get("k", x.view(6, 4), double), (x * 2).view(6, 4))
    assert torch.equal(cache.get("k", x[1:], double), x[1:] * 2)
    assert len(calls) == 3


def test_instance_is_preferred_where_it_costs_fewer_operations():
    assert not Outer(torch.empty(1, 20, 64), torch.empty(1, 20, 32)).cheaper_instantiated  # dp/(d+p) = 21.3
    assert Outer(torch.empty(1, 22, 64), torch.empty(1, 22, 32)).cheaper_instantiated


@pytest.mark.parametrize(
    ("positions", "rows", "columns", "dtype", "keeps"),
    [
        (20, 64, 32, torch.float32, False),
        (22, 64, 32, torch.float32, True),
        (22, 64, 32, torch.bfloat16, False),  # whose numbers have half of an instance's bytes
        (43, 64, 32, torch.bfloat16, True),
    ],
)
def test_what_is_kept_for_the_sum(positions, rows, columns, dtype, keeps):
    outer = Outer(torch.empty(1, positions, rows, dtype=dtype), torch.empty(1, positions, columns, dtype=dtype))
    assert outer.store_instantiated == keeps
    assert Stacked([outer, outer]).store_instantiated == keeps


@settings(max_examples=60, deadline=None, derandomize=True)
@given(b=st.integers(0, 4), e=st.integers(1, 5), rows=sizes, columns=sizes, lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
       dense=st.booleans(), seed=st.integers(0, 10**6), instantiate=st.booleans(), scratch=st.sampled_from([600, 2**26]))  # fmt: skip
def test_routed(b, e, rows, columns, lengths, dense, seed, instantiate, scratch):
    g = torch.Generator().manual_seed(seed)
    terms = []
    for s in lengths:  # uneven: the first expert gets most
        ids = torch.randint(0, e, (b, s), generator=g).where(
            torch.rand(b, s, generator=g) < 0.5, torch.zeros((), dtype=torch.long)
        )
        terms.append(Routed(ids, torch.randn(b, s, rows, generator=g), torch.randn(b, s, columns, generator=g), e))
    one_hots = [F.one_hot(t.ids, e).double() for t in terms]
    exact = sum(
        torch.einsum("bse,bsp,bsd->bepd", h, t.left.double(), t.right.double())
        for h, t in zip(one_hots, terms, strict=True)
    )
    if dense:
        terms.append(Dense(torch.randn(b, e, rows, columns, generator=g)))
        exact = exact + terms[-1].grad.double()
    before, arithmetic.SCRATCH_BYTES = arithmetic.SCRATCH_BYTES, scratch
    try:
        norm_sq = norm_of_sum(terms, instantiate=instantiate).squared()
    finally:
        arithmetic.SCRATCH_BYTES = before
    size = exact.flatten(1).square().sum(1)
    assert norm_sq.dtype == torch.float32
    assert ((norm_sq.double() - size).abs() <= 1e-5 * size + 1e-5).all()
    coef = torch.rand(b, generator=g)
    total = sum(t.weighted_sum(coef, LastResultCache()).double() for t in merge(terms))
    torch.testing.assert_close(total, torch.einsum("b,bepd->epd", coef.double(), exact), rtol=1e-4, atol=1e-4)
    (merged,) = merge(terms[: len(lengths)])
    torch.testing.assert_close(
        merged.instantiate().grad.double(), exact - (terms[-1].grad.double() if dense else 0), rtol=1e-4, atol=1e-4
    )


def test_the_only_term_of_its_kind_is_not_copied():
    outer, rows = (Outer(torch.randn(2, 5, 9), torch.randn(2, 5, 3)), Rows(torch.ones(2, 4).long(), torch.randn(2, 4, 3), 9))  # fmt: skip
    assert [id(t) for t in merge([rows, outer])] == [id(outer), id(rows)], "an embedding, and the head tied to it"
    ids, left, right = torch.ones(2, 4).long(), torch.randn(2, 4, 6), torch.randn(2, 4, 5)
    routed = Routed(ids, left, right, 3)
    assert merge([Dense(torch.zeros(2, 3, 6, 5)), routed])[0] is routed


def where_padding_has_gradients(kind, g):
    """Terms, and what they amount to: of 12 positions of 2 examples, the last 4 have gradients that are long and
    inputs that are zero."""
    p, d, t, b = 64, 48, 12, 2
    padding = torch.arange(t) >= 8
    left = torch.randn(b, t, p, generator=g).where(~padding[:, None], 1e5)
    right = torch.randn(b, t, d, generator=g).masked_fill(padding[:, None], 0)
    exact = torch.einsum("btp,btd->bpd", left.double(), right.double())
    if kind == "stacked":
        return [Stacked([Outer(left, right), Outer(left, right)])], torch.cat([exact, exact], 1)
    if kind == "tied":
        ids, grad = torch.randint(0, p, (b, 5), generator=g), torch.randn(b, 5, d, generator=g)
        return [Outer(left, right), Rows(ids, grad, p)], exact + written_out(Rows(ids, grad, p), p, d)
    if kind == "routed":
        return [Routed(torch.zeros(b, t, dtype=torch.long), left, right, 3)], exact
    if kind == "convolved":
        how = Convolution(torch.Size((p, d, 1)), (1,), (0,), (1,), 1)
        return [Convolved(right.mT[:, None], left.mT[:, None], how)], exact
    return [Outer(left, right)], exact


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("kind", ["outer", "stacked", "tied", "routed", "convolved"])
def test_long_gradients_of_positions_without_input_do_not_lengthen_norms(kind, chunks, monkeypatch):
    if chunks:
        monkeypatch.setattr(arithmetic, "SCRATCH_BYTES", 600)
    terms, exact = where_padding_has_gradients(kind, torch.Generator().manual_seed(0))
    norm_b = norm_of_sum(terms, cache=LastResultCache()).squared().sqrt().double()
    torch.testing.assert_close(norm_b, exact.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs=st.integers(1, 20), decades=st.floats(0, 12), left_over=st.floats(-6, 0), columns=st.sampled_from([512, 2048]),
       seed=st.integers(0, 10**6), kind=st.sampled_from(["outer", "tied"]))  # fmt: skip
def test_positions_of_unlike_lengths_that_cancel(pairs, decades, left_over, columns, seed, kind):
    """A long input times a short gradient against a short input times a long one: the norm is not too small, whatever
    is left of them."""
    g, b, rows = torch.Generator().manual_seed(seed), 3, 64
    long = 10 ** (decades * (torch.rand(b, 2 * pairs, 1, generator=g) - 0.5))
    sign = torch.tensor([1.0, -1.0]).repeat(pairs)[:, None]
    right = (
        torch.randn(b, 1, columns, generator=g) + 10**left_over * torch.randn(b, 2 * pairs, columns, generator=g)
    ) * long
    left = sign * torch.randn(b, 1, rows, generator=g) / long
    terms = [Outer(left, right)]
    if kind == "tied":
        terms.append(Rows(torch.arange(rows).expand(b, rows), -0.999 * (left.mT @ right), rows))
    exact = sum(written_out(term, rows, columns) for term in terms).flatten(1).norm(dim=1)
    norm_b = norm_of_sum(terms, cache=LastResultCache()).squared().sqrt()
    assert (norm_b >= exact * (1 - 1e-5)).all()


@pytest.mark.parametrize("positions", [2, 8, 32])
def test_few_positions_that_nearly_cancel(positions):
    """No further than is tolerated, so that inner products' rounding must be added for its own sake: norms were too
    small by 3e-4."""
    g, examples = torch.Generator().manual_seed(0), 512
    left_over = 10 ** (-1 - 1.5 * torch.rand(examples, 1, 1, generator=g))
    sign = torch.tensor([1.0, -1.0]).repeat(positions // 2)[:, None]
    left = sign * torch.randn(examples, 1, 64, generator=g) + left_over * torch.randn(
        examples, positions, 64, generator=g
    )
    right = torch.randn(examples, 1, 512, generator=g) + left_over * torch.randn(examples, positions, 512, generator=g)
    exact = written_out(Outer(left, right), 64, 512).flatten(1).norm(dim=1)
    norm_b = Outer(left, right).norm().squared().sqrt()
    assert (norm_b >= exact * (1 - 1e-6)).all()


@pytest.mark.parametrize("numbers", [2**15 + 1, 2**22 + 5])
def test_the_norm_of_a_long_gradient(numbers):
    """A table of embeddings instantiated: on the CPU torch's own norm of 4 million numbers is too small by 8e-5."""
    grad = torch.randn(2, numbers, generator=torch.Generator().manual_seed(0))
    (norm_b,) = Dense(grad).norm()
    torch.testing.assert_close(norm_b.double(), grad.double().norm(dim=1), rtol=1e-6, atol=0)


def test_an_input_whose_square_vanishes_times_a_gradient_that_is_long():
    left, right = torch.full((1, 2, 64), 1e17), torch.full((1, 2, 48), 1e-24)
    left[:, 1] = 0
    exact = written_out(Outer(left, right), 64, 48).norm()
    assert Outer(left, right).norm().squared().sqrt() >= exact


def members(protocol):
    return {name for name in (*protocol.__annotations__, *vars(protocol)) if not name.startswith("_")}


@pytest.mark.parametrize("family", [Dense, NormOnly, Outer, Stacked, Rows, Routed, Convolved])
def test_every_family_keeps_the_protocol(family):
    assert members(GradientTerm) <= {*dir(family)}
    for name in ("norm", "position_norms", "instantiate", "weighted_sum", "zero_examples"):
        assert (
            inspect.signature(getattr(family, name)).parameters.keys()
            == inspect.signature(getattr(GradientTerm, name)).parameters.keys()
        )


def test_a_norm_alone_gives_no_gradient():
    only = NormOnly(torch.tensor([3.0, float("nan")]))
    assert only.zero_examples(torch.tensor([False, True])).norm().norm.tolist() == [3.0, 0.0]
    for ask in (only.instantiate, lambda: only.weighted_sum(torch.ones(2))):
        with pytest.raises(TypeError, match="use clipping_mode='book_keeping'.*or register no norm sampler"):
            ask()


def test_a_cache_keeps_no_tensor_and_takes_no_other_for_it():
    """The input of a wide layer would stay until the layer before it is reached. What lies in its memory later is
    something else."""
    seen, x = LastResultCache(), torch.randn(1000)
    memory, result = weakref.ref(x.untyped_storage()), seen.get("sum", x, torch.sum)
    assert seen.known("sum", x.view(1000)) is result
    assert all(seen.known("sum", other) is None for other in (x[:999], x[1:], x.view(torch.int32), x.clone()))
    del x
    assert memory() is None and seen.known("sum", torch.randn(1000)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_instances_of_a_tall_weight_are_computed_transposed(batch, dtype):
    """What lies in memory is another matrix, and is measured and summed as it lies there."""
    term = Outer(torch.randn(batch, 5, 40).to(dtype), torch.randn(batch, 5, 3).to(dtype))
    instance, exact = term.instantiate(), written_out(term, 40, 3)
    assert instance.grad.shape == (batch, 40, 3) and instance.grad.mT.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(instance.grad.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.allclose(instance.norm().squared().double(), exact.flatten(1).square().sum(1), rtol=tolerance)
    coefficients = torch.rand(batch)
    for each, grads in (
        (instance, exact),
        (instance.zero_examples(torch.arange(batch) == 0), exact * (torch.arange(batch) != 0).view(-1, 1, 1)),
    ):
        total = each.weighted_sum(coefficients)
        assert total.is_contiguous() and total.shape == (40, 3)
        expected = torch.einsum("b,bpd->pd", coefficients.double(), grads)
        assert torch.allclose(total.double(), expected, rtol=tolerance, atol=10 * tolerance)
