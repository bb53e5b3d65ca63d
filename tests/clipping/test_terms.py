"""The term algebra against gradients that are written out, over drawn shapes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_transformers.clipping import terms as algebra
from dp_transformers.clipping.terms import Dense, Memo, Outer, Rows

sizes = st.integers(1, 9)


def written_out(term, rows, columns):
    if isinstance(term, Dense):
        return term.grad.double()
    if isinstance(term, Outer):
        return torch.einsum("btp,btd->bpd", term.left.double(), term.right.double())
    total = torch.zeros(len(term.ids), rows, columns, dtype=torch.float64)
    for b in range(len(term.ids)):
        for t in range(term.ids.shape[1]):
            total[b, term.ids[b, t]] += term.grad[b, t].double()
    return total


@settings(max_examples=60, deadline=None)
@given(b=st.integers(0, 4), rows=sizes, columns=sizes, lengths=st.lists(st.tuples(st.sampled_from("ORD"), sizes), min_size=1, max_size=4),
       seed=st.integers(0, 10**6), instantiate=st.booleans())  # fmt: skip
def test_norm_and_sum_of_any_mixture(b, rows, columns, lengths, seed, instantiate):
    g = torch.Generator().manual_seed(seed)
    made = {
        "O": lambda t: Outer(torch.randn(b, t, rows, generator=g), torch.randn(b, t, columns, generator=g)),
        "R": lambda t: Rows(torch.randint(0, rows, (b, t), generator=g), torch.randn(b, t, columns, generator=g), rows),
        "D": lambda t: Dense(torch.randn(b, rows, columns, generator=g)),
    }
    terms = [made[kind](t) for kind, t in lengths]
    exact = sum(written_out(t, rows, columns) for t in terms)
    norm_sq = algebra.squared_norm(terms, instantiate=instantiate, memo=Memo())
    scale = sum(written_out(t, rows, columns).flatten(1).norm(dim=1) for t in terms).square()  # what rounding is relative to
    assert norm_sq.dtype == torch.float32
    assert norm_sq.shape == (b,)
    assert ((norm_sq.double() - exact.flatten(1).square().sum(1)).abs() <= 1e-5 * scale + 1e-12).all()
    coef = torch.rand(b, generator=g)
    total = sum(t.weighted_sum(coef, Memo()).double() for t in algebra.merge(terms)) if b else torch.zeros(rows, columns).double()
    expected = torch.einsum("b,bpd->pd", coef.double(), exact)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_chunks_change_nothing(monkeypatch):
    torch.manual_seed(0)
    terms = [
        Outer(torch.randn(7, 5, 40), torch.randn(7, 5, 40)),
        Outer(torch.randn(7, 50, 6), torch.randn(7, 50, 7)),
        Rows(torch.randint(0, 4, (7, 9)), torch.randn(7, 9, 3), 4),
    ]
    tied = [Outer(torch.randn(7, 5, 4), torch.randn(7, 5, 3)), terms[2]]
    whole = [t.squared_norm(instantiate=i) for t in terms for i in (False, True)] + [algebra.squared_norm(tied)]
    monkeypatch.setattr(algebra, "SCRATCH_BYTES", 600)
    parts = [t.squared_norm(instantiate=i) for t in terms for i in (False, True)] + [algebra.squared_norm(tied)]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_memo_does_not_mistake_one_tensor_for_another():
    memo, calls = Memo(), []

    def double(x):
        calls.append(1)
        return x * 2

    x = torch.randn(4, 6)
    assert torch.equal(memo.get("k", x, double), x * 2)
    assert torch.equal(memo.get("k", x.detach(), double), x * 2)
    assert len(calls) == 1
    assert torch.equal(memo.get("k", x.view(6, 4), double), (x * 2).view(6, 4))
    assert torch.equal(memo.get("k", x[1:], double), x[1:] * 2)
    assert len(calls) == 3


def test_instance_is_preferred_where_it_costs_fewer_operations():
    assert not Outer(torch.empty(1, 20, 64), torch.empty(1, 20, 32)).prefers_instance  # dp/(d+p) = 21.3
    assert Outer(torch.empty(1, 22, 64), torch.empty(1, 22, 32)).prefers_instance
