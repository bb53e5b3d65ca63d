"""The clipping modes: what a layer's backward does with its terms, and how the clipped sum is formed afterwards.

=============  =====================================  ==================  =================================
mode           norm of a layer                        kept until the end  clipped sum
=============  =====================================  ==================  =================================
book_keeping   ghost or instantiated, by cost         the terms           from the terms (one backward)
ghost          ghost or instantiated, by cost         nothing             from the terms of a second backward
fast_gradient  instantiated, a layer at a time        nothing             from the terms of a second backward
per_sample     instantiated                           the instances       from the instances
=============  =====================================  ==================  =================================

Sources: book-keeping, Bu et al. 2023 (arXiv 2210.00038); ghost norms, Li et al. 2021 (arXiv 2110.05679); fast gradient
clipping, Lee and Kifer 2021 (arXiv 2009.03106); per-sample gradients, Abadi et al. 2016 (arXiv 1607.00133).

A mode is told of a backward pass before it begins (:meth:`Mode.begin`), and returns what sees it: every tap that is
reached gives its terms to :meth:`BackwardPass.add`, and at the end :meth:`BackwardPass.finish` is asked for the norms,
when the clipped sums must have been added.

Where groups of parameters are clipped by themselves, "the end" is that of each group: its sum is formed, and what was
kept of it is freed, inside the backward of the last layer of the group that is reached. With a group for each layer
nothing is kept, in one backward pass. Modes that go back a second time cannot do that, since a loss has one
coefficient.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, cast

import torch
from torch import nn

from ..mechanism.clipping_functions import ClippingFunction, GroupedClipping
from ..runtime.randomness import global_state, set_global_state
from .coefficients import Coefficients
from .gradient_sums import GradientSums
from .groups import ParameterGroup
from .loss_graph import LossGraph
from .memory import Plan
from .norms import NormAccumulator
from .owners import Owner
from .precision import exact_arithmetic, without_autocast
from .recorded_call import BackwardPass, ForwardPass
from .rounding import FP32, SPLIT, may_differ
from .terms import Dense, LastResultCache, NormOnly, Routed, Stacked, Term
from .terms.tied_weights import merge, norm_of_sum, position_norms, small_gradient
from .trainable import TrainableParameters

_LONGER = 2.0**-10  # by how much what is summed may be longer than what was measured
Clip = Callable[..., Coefficients]  # from (B,) squared norms, and the function of their group as ``clipping``


class Mode(Protocol):
    """A mode says how norms are measured and clipped sums formed.

    Attributes:
        name: What the user calls it.
        one_pass: Whether one backward pass is enough, so that it may be one that the user runs.
    """

    @property
    def name(self) -> str: ...

    @property
    def one_pass(self) -> bool: ...

    def refuse(self, trainable: TrainableParameters) -> None:
        """Raise ValueError if the mode is not exact for parameters that lie like these."""

    def begin(
        self,
        forward: ForwardPass,
        groups: Sequence[ParameterGroup],
        clip: Clip,
        sums: GradientSums | None,
        graph: LossGraph | None,
        plan: Plan | None = None,
    ) -> BackwardPass:
        """A backward pass over ``forward`` begins, which ``graph`` can run again; None where the user runs it. Without
        ``sums`` it only measures. ``plan`` says of what instances are kept; None leaves it to the terms."""


class MeasuringPass:
    """Takes the terms of each parameter together as soon as all its uses were reached; subclasses say what becomes of
    them then."""

    keeps = False

    def __init__(self, forward: ForwardPass, *, instantiate: bool, plan: Plan | None = None):
        self.forward, self.instantiate, self.plan = forward, instantiate, plan
        self._held: set[int] = set()  # where the graph's tensors of the call lie that was reached last
        self.counts = forward.trainable.parallel.counts_norm_of
        self.cache = LastResultCache()
        self._open: dict[nn.Parameter, list[Term]] = defaultdict(list)  # used several times, not all seen yet
        self._closed: set[nn.Parameter] = set()

    def meet(self, owner: Owner, saved: Sequence[torch.Tensor]) -> BackwardPass | None:
        if self.plan is not None:
            self._held = {x.untyped_storage().data_ptr() for x in saved}
        return self

    def wants_only_norms_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        return not (self.keeps or self.instantiate) and all(self.forward.uses[p] == 1 for p in parameters)

    def add(self, parameter: nn.Parameter, term: Term) -> None:
        """At the last use that the forward pass has seen, the norm of all together is measured."""
        if parameter in self._closed:
            raise RuntimeError(
                f"parameter '{self.forward.trainable.name_of(parameter)}' was used more often in backward than in the "
                "forward pass: something else than torch's activation checkpointing ran a part of the forward pass "
                "again. Use torch.utils.checkpoint with use_reentrant=False (gradient_checkpointing=True), or switch "
                "off what runs it again."
            )
        if self.plan is not None:
            self.plan.note(self.forward, parameter, term, self._held)
        seen = self._open[parameter]
        seen.append(term.instantiate() if self.keeps and isinstance(term, Dense) else term)
        if len(seen) >= self.forward.uses[parameter]:
            self._close(parameter)

    def _close(self, parameter: nn.Parameter) -> None:
        self._closed.add(parameter)
        self.close(parameter, merge(self._open.pop(parameter)))

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        """Take the terms of all uses together."""
        raise NotImplementedError

    def finish(self) -> torch.Tensor:
        """All taps were reached: form the clipped sums; (B,) the gradient norms."""
        raise NotImplementedError

    def close_all(self) -> None:
        """Close the parameters of announced uses that the losses do not depend on."""
        with exact_arithmetic(self.forward.probe.device):
            for parameter in list(self._open):
                self._close(parameter)

    def squared_norms(self, norms: NormAccumulator) -> torch.Tensor:
        """(B,) over the parameters that were added to ``norms``."""
        total_b = norms.total(self.forward.probe.device)
        total_b = torch.zeros_like(self.forward.probe) if total_b is None else total_b
        return self.forward.trainable.parallel.sum_over_group(total_b)


class _KeptGroup:
    """What is kept of one group: terms, or instances."""

    def __init__(self, group: ParameterGroup, forward: ForwardPass):
        self.clipping, self.parameters = group.clipping, group.parameters
        self.missing = sum(forward.uses[p] > 0 for p in group.parameters)  # parameters that will come
        self.norms = NormAccumulator()
        self.terms: dict[nn.Parameter, list[Term]] = {}
        # (B, n), kept to be laid side by side
        self.small: dict[torch.device, dict[nn.Parameter, torch.Tensor]] = defaultdict(dict)
        self._together: list[tuple[list[nn.Parameter], list[int], Dense]] = []  # with each one's n

    def lay_together(self) -> None:
        """Add the norm of the small gradients, which is measured at once."""
        for small in self.small.values():
            together = Dense(torch.cat(list(small.values()), 1) if len(small) > 1 else next(iter(small.values())))
            self._together.append((list(small), [x.shape[1] for x in small.values()], together))
            self.norms.add(together.norm())
        self.small.clear()

    def small_sums(self, clipped: Coefficients) -> dict[nn.Parameter, torch.Tensor]:
        """The clipped sums of small gradients, by one product for all of them."""
        sums = {}
        for parameters, sizes, gradients in self._together:
            total = _weighted_sum(gradients, clipped, gradients.grad.device)
            # .data: each counts its own changes
            sums |= {p: piece.data for p, piece in zip(parameters, total.split(sizes), strict=True)}
        return sums


class KeptTerms(MeasuringPass):
    """Keeps the terms, or the instances, of each group and forms the clipped sums from them: of a group among several
    as soon as all of it was seen, if no other rank has to do the same in the same order."""

    keeps = True

    def __init__(
        self,
        forward: ForwardPass,
        groups: Sequence[ParameterGroup],
        clip: Clip,
        sums: GradientSums | None,
        *,
        instantiate: bool = False,
        plan: Plan | None = None,
    ):
        super().__init__(forward, instantiate=instantiate, plan=plan)
        self._clip, self._sums = clip, sums
        self._groups = [_KeptGroup(group, forward) for group in groups]
        self._group_of = {p: group for group in self._groups for p in group.parameters}
        self._streams = len(groups) > 1 and not (forward.trainable.shards or forward.trainable.parallel)
        self._norms: list[torch.Tensor] = []  # (B,), of the groups that were clipped

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        group = self._group_of[parameter]
        group.terms[parameter] = self._measure(parameter, terms, group)
        group.missing -= 1
        if self._streams and not group.missing:
            self._clip_group(group)

    def _measure(self, parameter: nn.Parameter, terms: list[Term], group: _KeptGroup) -> list[Term]:
        """Add the norm of the terms to that of the group, and return what is to be kept of them."""
        terms = merge([t.instantiate() if self._keeps_instance(parameter, t) else t for t in terms])
        if not self.counts(parameter):
            return terms
        if not self.instantiate and (small := small_gradient(terms)) is not None:
            group.small[small.grad.device][parameter] = small.flat
            return []
        measured = norm_of_sum(terms, instantiate=self.instantiate, cache=self.cache)
        # the sum is of these very terms, and most norms know what it may be off by
        inexact = [t for t in terms if t.is_bf16 or isinstance(t, Routed | Stacked)]
        rounding = SPLIT if any(t.is_bf16 for t in inexact) else FP32
        group.norms.add(measured, position_norms(inexact, self.cache), rounding)
        return terms

    def _keeps_instance(self, parameter: nn.Parameter, term: Term) -> bool:
        if self.instantiate or self.plan is None:
            return self.instantiate or term.store_instantiated
        return self.plan.keeps_instance(parameter, term)

    def finish(self) -> torch.Tensor:
        self.close_all()
        for group in self._groups:
            if not self._streams or group.missing:  # modules that were not called leave the others of their group
                self._clip_group(group)
        return self._norms[0] if len(self._norms) == 1 else torch.stack(self._norms).norm(dim=0)

    def _clip_group(self, group: _KeptGroup) -> None:
        device = self.forward.probe.device
        with without_autocast(device), exact_arithmetic(device):
            group.lay_together()
            clipped = self._clip(self.squared_norms(group.norms), clipping=group.clipping)
            self._norms.append(clipped.norms_b)
            if self._sums is None:
                return
            if self.instantiate:
                _hand_out(group.terms, clipped)
            self._add_sums(group, clipped, self._sums)

    def _add_sums(self, group: _KeptGroup, clipped: Coefficients, sums: GradientSums) -> None:
        cache, shards, small = LastResultCache(), self.forward.trainable.shards, group.small_sums(clipped)
        for parameter in sums.order(group.terms, group.parameters):
            device = shards.unsharded(parameter).device
            terms = group.terms.pop(parameter, [])  # a record is freed as soon as its sum is formed
            parts = (_weighted_sum(term, clipped, device, cache) for term in terms)
            sums.add(parameter, [small[parameter]] if parameter in small else parts, may_wait=True)


def _hand_out(instances: Mapping[nn.Parameter, list[Term]], clipped: Coefficients) -> None:
    """Let each parameter have its examples' gradients as ``grad_sample``."""
    for p, terms in instances.items():
        # pyrefly: ignore[missing-attribute]  (Opacus's name for it, of which torch's types know nothing)
        p.grad_sample = terms[0].instantiate().grad.contiguous().view(len(clipped.norms_b), *p.shape)


def _weighted_sum(
    term: Term, clipped: Coefficients, device: torch.device, cache: LastResultCache | None = None
) -> torch.Tensor:
    term = term if clipped.invalid_b is None else term.zero_examples(clipped.invalid_b.to(device))
    return term.weighted_sum(clipped.of_sum_b.to(device), cache)


@dataclass(frozen=True)
class OnePass:
    """Keeps what sums are formed from: the terms, or each example's gradient, which is then handed out too."""

    name: str
    instantiate: bool
    one_pass = True

    def refuse(self, trainable: TrainableParameters) -> None:
        if self.instantiate and trainable.parallel:
            raise ValueError(
                f"clipping mode '{self.name}' hands out whole gradients, which no process of a tensor-parallel model "
                "has. Use clipping_mode='auto' or 'book_keeping'."
            )

    def begin(
        self,
        forward: ForwardPass,
        groups: Sequence[ParameterGroup],
        clip: Clip,
        sums: GradientSums | None,
        graph: LossGraph | None,
        plan: Plan | None = None,
    ) -> BackwardPass:
        return KeptTerms(forward, groups, clip, sums, instantiate=self.instantiate, plan=plan)


@dataclass(frozen=True)
class TwoPass:
    """Keeps nothing: goes back over the losses a second time, once their coefficients are known."""

    name: str
    instantiate: bool
    one_pass = False

    def refuse(self, trainable: TrainableParameters) -> None:
        """There is nothing to refuse."""

    def begin(
        self,
        forward: ForwardPass,
        groups: Sequence[ParameterGroup],
        clip: Clip,
        sums: GradientSums | None,
        graph: LossGraph | None,
        plan: Plan | None = None,
    ) -> BackwardPass:
        (group,) = groups  # several are refused where they are set
        # the user does not run it, for it is not one pass
        return _FirstOfTwo(self, forward, group, clip, sums, cast(LossGraph, graph), plan)


class _Recomputed:
    """It notes what activation checkpointing recomputed in one backward pass: sizes of what every call was given."""

    def __init__(self, forward: ForwardPass):
        self._forward = forward
        self._number: Counter[Owner] = Counter()
        self.sizes: dict[tuple[Owner, int], list[torch.Tensor]] = {}

    def note(self, owner: Owner, saved: Sequence[torch.Tensor]) -> None:
        call = owner, self._number[owner]
        self._number[owner] += 1
        if self._forward.recomputes:
            self.sizes[call] = [torch.linalg.vector_norm(x.float(), 1) for x in saved if x.is_floating_point()]

    def first_other_than(self, other: _Recomputed) -> Owner | None:
        """The first module that was given something else; None if all were given the same."""
        # those before the first that was recomputed are in one of them only
        owners = [call[0] for call in self.sizes if call in other.sizes for _ in self.sizes[call]]
        if not owners:
            return None
        device = self._forward.probe.device
        a, b = (
            torch.stack([x.to(device) for call in self.sizes if call in other.sizes for x in sizes[call]])
            for sizes in (self.sizes, other.sizes)
        )
        differ = ~((a == b) | (a - b).abs().le(1e-5 * a) | ~torch.isfinite(a))
        return owners[int(differ.int().argmax())] if differ.any() else None


class _OneOfTwo(MeasuringPass):
    """Measures norms, and notes what activation checkpointing recomputed."""

    measures = True

    def __init__(self, forward: ForwardPass, *, instantiate: bool, plan: Plan | None = None):
        super().__init__(forward, instantiate=instantiate, plan=plan)
        self.recomputed, self.norms = _Recomputed(forward), NormAccumulator()

    def meet(self, owner: Owner, saved: Sequence[torch.Tensor]) -> BackwardPass | None:
        self.recomputed.note(owner, saved)
        return super().meet(owner, saved)

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        if self.counts(parameter):
            measured = norm_of_sum(terms, instantiate=self.instantiate, cache=self.cache)
            rounding = SPLIT if any(t.is_bf16 for t in terms) else FP32
            self.norms.add(measured, position_norms(terms, self.cache), rounding)

    def finish(self) -> torch.Tensor:
        self.close_all()
        if not self.measures:
            return torch.zeros_like(self.forward.probe)
        with exact_arithmetic(self.forward.probe.device):
            return self.squared_norms(self.norms).sqrt()


class _FirstOfTwo(_OneOfTwo):
    """Measures, and at the end goes back a second time, over the same numbers.

    Going back over the losses times their coefficients would round every product anew: gradients that cancel behind
    a weight, and so have no part in its norm, would not cancel then. And what autograd sums in half precision is
    rounded by more than any one example's gradient.
    """

    def __init__(
        self,
        mode: TwoPass,
        forward: ForwardPass,
        group: ParameterGroup,
        clip: Clip,
        sums: GradientSums | None,
        graph: LossGraph,
        plan: Plan | None,
    ):
        super().__init__(forward, instantiate=mode.instantiate, plan=plan)
        self._name, self._group, self._clip, self._sums, self._graph = mode.name, group, clip, sums, graph
        self._numbers = global_state(graph.device)
        self.was_given_norms = False  # by a function of the user's, without the gradients that they are of

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        self.was_given_norms |= any(isinstance(term, NormOnly) for term in terms)
        super().close(parameter, terms)

    def finish(self) -> torch.Tensor:
        self.close_all()
        with exact_arithmetic(self.forward.probe.device):
            clipped = self._clip(self.squared_norms(self.norms), clipping=self._group.clipping)
        if self._sums is not None:
            self._sum(clipped, self._sums)
        return clipped.norms_b

    def _sum(self, clipped: Coefficients, sums: GradientSums) -> None:
        second = _SecondOfTwo(self, clipped, sums)
        self.forward.go_back(second)
        # checkpointed blocks draw again what they drew when they were measured
        set_global_state(self._graph.device, self._numbers)
        shards = self.forward.trainable.shards
        with sums.in_gradients() if shards else nullcontext(), shards.taking_sums():
            self._graph.go_back(retain_graph=False)
        self._end_second(second, clipped, sums)

    def _end_second(self, second: _SecondOfTwo, clipped: Coefficients, sums: GradientSums) -> None:
        """Raise ValueError if what was summed is not what was measured."""
        norms_b, trainable = second.finish(), self.forward.trainable
        other = self.recomputed.first_other_than(second.recomputed)
        if trainable.shards.any_rank(other is not None, self.forward.probe.device):
            sums.clear()
            raise ValueError(
                "activation checkpointing recomputed other activations in the second backward pass of clipping "
                f"mode '{self._name}' than in the first (first seen in what {other or 'a module on another rank'} "
                "was given), so the gradient that is summed is not the one whose norm was measured: a "
                "checkpointed module before it draws random numbers from a generator of its own, depends on how "
                "often it ran, or is not deterministic. Let it draw from torch's global generator and keep no "
                "state; for what is not deterministic use clipping_mode='book_keeping', which goes back once."
            )
        if second.measures:
            self._expect_no_longer(norms_b * clipped.of_sum_b, clipped)

    def _expect_no_longer(self, summed_b: torch.Tensor, clipped: Coefficients) -> None:
        """Expect that what is summed has the lengths that were measured."""
        bound = math.inf if self._group.clipping is None else self._group.clipping.sensitivity
        holds_b = summed_b <= clipped.of_sum_b * clipped.norms_b * (1 + _LONGER) + _LONGER * bound
        holds_b = holds_b if clipped.invalid_b is None else holds_b | clipped.invalid_b
        self.forward.conditions.expect(holds_b.all(), partial(_refuse_longer, self._name))


def _refuse_longer(mode: str) -> NoReturn:
    raise ValueError(
        f"in the second backward pass of clipping mode '{mode}' an example's gradient is longer than it was in the "
        "first, which measured it: gradients that nearly cancel are rounded otherwise there, an operation is not "
        "deterministic, or a function of register_norm_sampler gives norms that are too small. Correct that function, "
        "or use clipping_mode='book_keeping', which goes back once."
    )


class _SecondOfTwo(_OneOfTwo):
    """Adds the sum of each parameter as soon as all its uses were reached. It measures again where operations need not
    give the same numbers twice, and where the first pass was given norms."""

    def __init__(self, first: _FirstOfTwo, clipped: Coefficients, sums: GradientSums):
        super().__init__(first.forward, instantiate=first.instantiate)
        self.measures = may_differ(first.forward.probe.device) or first.was_given_norms
        self._clipped, self._sums = clipped, sums
        self._last = LastResultCache()
        self._late: dict[nn.Parameter, torch.Tensor] = {}  # sums to be added when the backward pass is over

    def wants_only_norms_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        return False

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        if self.measures:
            super().close(parameter, terms)
        shards, reentrant = self.forward.trainable.shards, self.forward.reentrant
        device = shards.unsharded(parameter).device
        with without_autocast(self.forward.probe.device):
            parts = (_weighted_sum(term, self._clipped, device, self._last) for term in terms)
            if not (shards or reentrant):
                self._sums.add(parameter, parts)
                return
            total = cast(torch.Tensor, self._sums.total(parameter, parts))
            # reentrant checkpointing goes back in a way that fills every ``grad``, after which those are put back; and
            # a unit of FSDP2 that is through takes nothing any more
            if reentrant or not shards.take(parameter, total):
                self._late[parameter] = total

    def finish(self) -> torch.Tensor:
        norms_b, trainable = super().finish(), self.forward.trainable
        if trainable.shards.any_rank(bool(self._late), self.forward.probe.device):
            for parameter in self._sums.order(self._late, trainable.parameters):
                self._sums.add(parameter, [self._late.pop(parameter)] if parameter in self._late else [])
        return norms_b


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        OnePass("book_keeping", instantiate=False),
        TwoPass("ghost", instantiate=False),
        TwoPass("fast_gradient", instantiate=True),
        OnePass("per_sample", instantiate=True),
    )
}


def choose_mode(name: str, model: nn.Module, clipping: ClippingFunction | None = None) -> Mode:
    """The mode for ``name``; "auto" is book-keeping, and ghost where activations are checkpointed (records would undo
    that) and ``clipping`` knows one norm for all parameters.

    Decided from the model's configuration alone, so every rank decides alike.
    """
    if name == "auto":
        checkpointed = any(
            getattr(m, "gradient_checkpointing", False) is True or hasattr(m, "_checkpoint_wrapped_module")
            for m in model.modules()
        )
        name = "ghost" if checkpointed and not isinstance(clipping, GroupedClipping) else "book_keeping"
    if name not in MODES:
        raise ValueError(f"clipping mode {name!r} is unknown; choose 'auto' or one of {sorted(MODES)}.")
    return MODES[name]
