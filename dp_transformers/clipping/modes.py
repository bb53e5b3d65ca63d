"""The clipping modes: how norms are measured in the backward pass, and how the clipped sum is formed.

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

:meth:`Mode.begin` makes the object that observes a backward pass: every tap adds its terms by
:meth:`BackwardPass.add`, and :meth:`BackwardPass.finish` adds the clipped sums and returns the norms.

If groups of parameters are clipped separately, the sum of a group is formed, and its terms are freed, inside the
backward of the last layer of the group. With a group for each layer, nothing is kept in one backward pass. Modes with
a second backward pass cannot do this, since a loss has one coefficient."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, cast

import torch
from torch import nn

from ..mechanism.clipping_functions import ClippingFunction, GroupedClipping
from ..runtime.randomness import global_state, set_global_state
from .coefficients import Coefficients, ParameterGroup
from .gradient_sums import GradientSums
from .loss_graph import LossGraph
from .memory import Plan
from .norms import FP32, SPLIT, NormAccumulator
from .owners import Owner
from .precision import exact_arithmetic, without_autocast
from .recorded_call import BackwardPass, ForwardPass
from .terms import Dense, LastResultCache, NormOnly, Routed, Stacked, Term
from .terms.tied_weights import merge, norm_of_sum, position_norms, small_gradient
from .trainable import TrainableParameters

_LONGER = 2.0**-10  # relative amount by which a summed gradient may be longer than its measured norm
Clip = Callable[..., Coefficients]  # takes (B,) squared norms, and the function of their group as ``clipping``


class MeasuringPass:
    """Collects the terms of each parameter until all its uses were reached, and passes them to :meth:`close`."""

    keeps = False

    def __init__(self, forward: ForwardPass, *, instantiate: bool, plan: Plan | None = None):
        self.forward, self.instantiate, self.plan = forward, instantiate, plan
        self._held: set[int] = set()  # addresses of the tensors that the graph saved for the current call
        self.counts = forward.trainable.parallel.counts_norm_of
        self.cache = LastResultCache()
        self._open: dict[nn.Parameter, list[Term]] = defaultdict(list)  # parameters with uses still to come
        self._closed: set[nn.Parameter] = set()

    def on_call(self, owner: Owner, saved: Sequence[torch.Tensor]) -> None:
        if self.plan is not None:
            self._held = {x.untyped_storage().data_ptr() for x in saved}

    def wants_only_norms_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        keeps_terms = self.keeps or self.instantiate or self.forward.units is not None
        return not keeps_terms and all(self.forward.uses[p] == 1 for p in parameters)

    def add(self, parameter: nn.Parameter, term: Term) -> None:
        """Collect a term. After the last use that the forward pass recorded, close the parameter."""
        if parameter in self._closed:
            raise RuntimeError(
                f"parameter '{self.forward.trainable.name_of(parameter)}' was used more often in backward than in the "
                "forward pass: something else than torch's activation checkpointing ran a part of the forward pass "
                "again. Use torch.utils.checkpoint with use_reentrant=False (gradient_checkpointing=True), or switch "
                "off what runs it again."
            )
        if self.plan is not None:
            self.plan.budget.record(self.forward, parameter, term, self._held)
        seen = self._open[parameter]
        seen.append(term.instantiate() if self.keeps and isinstance(term, Dense) else term)
        if len(seen) >= self.forward.uses[parameter]:
            self._close(parameter)

    def _close(self, parameter: nn.Parameter) -> None:
        self._closed.add(parameter)
        self.close(parameter, merge(self._open.pop(parameter)))

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        """Process the terms of all uses of a parameter."""
        raise NotImplementedError

    def finish(self) -> torch.Tensor:
        """Form the clipped sums after all taps were reached. Return the (B,) gradient norms."""
        raise NotImplementedError

    def close_all(self) -> None:
        """Close parameters with recorded uses that the losses do not depend on."""
        with exact_arithmetic(self.forward.probe.device):
            for parameter in list(self._open):
                self._close(parameter)

    def add_norm(self, norms: NormAccumulator, terms: Sequence[Term], inexact: Sequence[Term]) -> None:
        """Add the norm of the sum of ``terms``, all uses of a parameter, with an allowance for the rounding of those
        that are ``inexact``."""
        if self.forward.units is not None:
            self.forward.units.add_norms(norms, terms, instantiate=self.instantiate)
            return
        measured = norm_of_sum(terms, instantiate=self.instantiate, cache=self.cache)
        rounding = SPLIT if any(t.is_bf16 for t in inexact) else FP32
        norms.add(measured, position_norms(inexact, self.cache), rounding)

    def squared_norms(self, norms: NormAccumulator) -> torch.Tensor:
        """Return the (B,) squared norms over all parameters in ``norms``, or (U,) by unit."""
        total_b, units = norms.total(self.forward.probe.device), self.forward.units
        if total_b is None:
            total_b = torch.zeros_like(self.forward.probe) if units is None else units.zeros()
        return self.forward.trainable.parallel.sum_over_group(total_b)


class _KeptGroup:
    """The terms or instances that are kept for one group."""

    def __init__(self, group: ParameterGroup, forward: ForwardPass):
        self.clipping, self.parameters, self._units = group.clipping, group.parameters, forward.units
        self.missing = sum(forward.uses[p] > 0 for p in group.parameters)  # parameters without terms yet
        self.norms = NormAccumulator()
        self.terms: dict[nn.Parameter, list[Term]] = {}
        # (B, n) gradients that are concatenated
        self.small: dict[torch.device, dict[nn.Parameter, torch.Tensor]] = defaultdict(dict)
        self._concatenated: list[tuple[list[nn.Parameter], list[int], Dense]] = []  # parameters, n of each, (B, sum n)

    def measure_small(self) -> None:
        """Concatenate the small gradients of each device, and add their norm."""
        for small in self.small.values():
            joined = Dense(torch.cat(list(small.values()), 1) if len(small) > 1 else next(iter(small.values())))
            self._concatenated.append((list(small), [x.shape[1] for x in small.values()], joined))
            if self._units is None:
                self.norms.add(joined.norm())
            else:
                self._units.add_norms(self.norms, [joined])
        self.small.clear()

    def small_sums(self, clipped: Coefficients) -> dict[nn.Parameter, torch.Tensor]:
        """Return the clipped sums of small gradients, computed by one product for each device."""
        sums = {}
        for parameters, sizes, gradients in self._concatenated:
            total = _weighted_sum(gradients, clipped, gradients.grad.device)
            # .data: each piece has its own version counter
            sums |= {p: piece.data for p, piece in zip(parameters, total.split(sizes), strict=True)}
        return sums


class KeptTerms(MeasuringPass):
    """Keeps the terms, or the instances, of each group and forms the clipped sums from them. One of several groups is
    clipped as soon as it is complete, unless ranks must form sums in the same order."""

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
        self._norms: list[torch.Tensor] = []  # (B,) norms of the groups that were clipped

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        group = self._group_of[parameter]
        group.terms[parameter] = self._measure(parameter, terms, group)
        group.missing -= 1
        if self._streams and not group.missing:
            self._clip_group(group)

    def _measure(self, parameter: nn.Parameter, terms: list[Term], group: _KeptGroup) -> list[Term]:
        """Add the norm of the terms to that of the group, and return the terms to keep."""
        terms = merge([t.instantiate() if self._keeps_instance(parameter, t) else t for t in terms])
        if not self.counts(parameter):
            return terms
        if not self.instantiate and (small := small_gradient(terms)) is not None:
            group.small[small.grad.device][parameter] = small.flat
            return []
        # the sum is formed from these terms, and most norms include its rounding error already
        self.add_norm(group.norms, terms, [t for t in terms if t.is_bf16 or isinstance(t, (Routed, Stacked))])
        return terms

    def _keeps_instance(self, parameter: nn.Parameter, term: Term) -> bool:
        if self.instantiate or self.plan is None:
            return self.instantiate or term.store_instantiated
        return self.plan.keeps_instance(parameter, term)

    def finish(self) -> torch.Tensor:
        self.close_all()
        for group in self._groups:
            if not self._streams or group.missing:  # a module of the group was not called
                self._clip_group(group)
        return self._norms[0] if len(self._norms) == 1 else torch.stack(self._norms).norm(dim=0)

    def _clip_group(self, group: _KeptGroup) -> None:
        device = self.forward.probe.device
        with without_autocast(device), exact_arithmetic(device):
            group.measure_small()
            clipped = self._clip(self.squared_norms(group.norms), clipping=group.clipping)
            self._norms.append(clipped.norms_b)
            if self._sums is None:
                return
            if self.instantiate:
                _set_grad_samples(group.terms)
            self._add_sums(group, clipped, self._sums)

    def _add_sums(self, group: _KeptGroup, clipped: Coefficients, sums: GradientSums) -> None:
        cache, shards, small = LastResultCache(), self.forward.trainable.shards, group.small_sums(clipped)
        for parameter in sums.order(group.terms, group.parameters):
            device = shards.unsharded(parameter).device
            terms = group.terms.pop(parameter, [])  # freed as soon as the sum is formed
            parts = (_weighted_sum(term, clipped, device, cache) for term in terms)
            sums.add(parameter, [small[parameter]] if parameter in small else parts, may_wait=True)


def _set_grad_samples(instances: Mapping[nn.Parameter, list[Term]]) -> None:
    """Set ``p.grad_sample`` to the (B, *p.shape) per-example gradients."""
    for p, terms in instances.items():
        grad = terms[0].instantiate().grad
        # pyrefly: ignore[missing-attribute]  (an attribute of Opacus, unknown to torch's types)
        p.grad_sample = grad.contiguous().view(len(grad), *p.shape)


def _weighted_sum(
    term: Term, clipped: Coefficients, device: torch.device, cache: LastResultCache | None = None
) -> torch.Tensor:
    coef_b, invalid_b = clipped.of_rows()
    term = term if invalid_b is None else term.zero_examples(invalid_b.to(device))
    return term.weighted_sum(coef_b.to(device), cache)


class _Recomputed:
    """Records the norms of the inputs of calls that activation checkpointing recomputes in one backward pass."""

    def __init__(self, forward: ForwardPass):
        self._forward = forward
        self._number: Counter[Owner] = Counter()
        self.sizes: dict[tuple[Owner, int], list[torch.Tensor]] = {}

    def record(self, owner: Owner, saved: Sequence[torch.Tensor]) -> None:
        call = owner, self._number[owner]
        self._number[owner] += 1
        if self._forward.recomputes:
            self.sizes[call] = [torch.linalg.vector_norm(x.float(), 1) for x in saved if x.is_floating_point()]

    def first_other_than(self, other: _Recomputed) -> Owner | None:
        """Return the first module with different inputs; None if all inputs are the same."""
        # calls before the first recomputed one are in one record only
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


class _CheckedPass(MeasuringPass):
    """Measures norms, and records what activation checkpointing recomputes."""

    measures = True

    def __init__(self, forward: ForwardPass, *, instantiate: bool, plan: Plan | None = None):
        super().__init__(forward, instantiate=instantiate, plan=plan)
        self.recomputed, self.norms = _Recomputed(forward), NormAccumulator()

    def on_call(self, owner: Owner, saved: Sequence[torch.Tensor]) -> None:
        self.recomputed.record(owner, saved)
        super().on_call(owner, saved)

    def close(self, parameter: nn.Parameter, terms: list[Term]) -> None:
        if self.counts(parameter):
            self.add_norm(self.norms, terms, terms)

    def finish(self) -> torch.Tensor:
        self.close_all()
        if not self.measures:
            return torch.zeros_like(self.forward.probe)
        with exact_arithmetic(self.forward.probe.device):
            return self.squared_norms(self.norms).sqrt()


class _FirstPass(_CheckedPass):
    """Measures norms, and then runs a second backward pass over the same numbers.

    A backward pass over the losses times their coefficients would round every product differently: gradients that
    cancel behind a weight, and so do not count in its norm, would no longer cancel. And sums that autograd forms in
    half precision are rounded by more than one example's gradient."""

    def __init__(
        self,
        mode: Mode,
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
        self.was_given_norms = False  # a function of the user gave norms without gradients

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
        second = _SecondPass(self, clipped, sums)
        self.forward.go_back(second)
        # checkpointed blocks draw the same random numbers again
        set_global_state(self._graph.device, self._numbers)
        shards = self.forward.trainable.shards
        with sums.in_gradients() if shards else nullcontext(), shards.taking_sums():
            self._graph.go_back(retain_graph=False)
        self._end_second(second, clipped, sums)

    def _end_second(self, second: _SecondPass, clipped: Coefficients, sums: GradientSums) -> None:
        """Raise ValueError if the summed gradients are not the measured ones."""
        norms_b, trainable = second.finish(), self.forward.trainable
        other = self.recomputed.first_other_than(second.recomputed)
        if trainable.shards.any_rank(other is not None, self.forward.probe.device):
            sums.clear()
            raise ValueError(
                "activation checkpointing recomputed other activations in the second backward pass of clipping "
                f"mode '{self._name}' than in the first (first seen in the inputs of "
                f"{other or 'a module on another rank'}): a checkpointed module before it draws random numbers from a "
                "generator of its own, depends on how often it ran, or is not deterministic. Let it draw from torch's "
                "global generator and keep no state, or use clipping_mode='book_keeping', which has one backward pass."
            )
        if second.measures:
            self._expect_no_longer(norms_b * clipped.of_sum_b, clipped)

    def _expect_no_longer(self, summed_b: torch.Tensor, clipped: Coefficients) -> None:
        """Expect that the summed gradients are not longer than the measured norms."""
        bound = math.inf if self._group.clipping is None else self._group.clipping.sensitivity
        holds_b = summed_b <= clipped.of_sum_b * clipped.norms_b * (1 + _LONGER) + _LONGER * bound
        holds_b = holds_b if clipped.invalid_b is None else holds_b | clipped.invalid_b
        self.forward.deferred_checks.expect(holds_b.all(), partial(_refuse_longer, self._name))


def _refuse_longer(mode: str) -> NoReturn:
    raise ValueError(
        f"in the second backward pass of clipping mode '{mode}' an example's gradient is longer than it was in the "
        "first: gradients that nearly cancel are rounded differently there, an operation is not deterministic, or a "
        "function of register_norm_sampler gives norms that are too small. Correct that function, or use "
        "clipping_mode='book_keeping', which has one backward pass."
    )


def may_differ(device: torch.device) -> bool:
    """Return True if an operation on ``device`` may give different numbers when it runs again: kernels of accelerators
    add up in no fixed order by default."""
    return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()


class _SecondPass(_CheckedPass):
    """Adds the sum of each parameter as soon as all its uses were reached. It measures again if operations may give
    different numbers, or if the first pass was given norms only."""

    def __init__(self, first: _FirstPass, clipped: Coefficients, sums: GradientSums):
        super().__init__(first.forward, instantiate=first.instantiate)
        self.measures = may_differ(first.forward.probe.device) or first.was_given_norms
        self._clipped, self._sums = clipped, sums
        self._last = LastResultCache()
        self._late: dict[nn.Parameter, torch.Tensor] = {}  # sums to be added after the backward pass

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
            # reentrant checkpointing fills every ``grad``, which is restored afterwards; and a unit of FSDP2 that has
            # ended its backward accepts no more
            if reentrant or not shards.accept(parameter, total):
                self._late[parameter] = total

    def finish(self) -> torch.Tensor:
        norms_b, trainable = super().finish(), self.forward.trainable
        if trainable.shards.any_rank(bool(self._late), self.forward.probe.device):
            for parameter in self._sums.order(self._late, trainable.parameters):
                self._sums.add(parameter, [self._late.pop(parameter)] if parameter in self._late else [])
        return norms_b


@dataclass(frozen=True)
class Mode:
    """How norms are measured and clipped sums are formed.

    Attributes:
        name: Its name for users.
        one_pass: True if the terms, or the instances, are kept until the sums are formed, so that one backward pass is
            enough; else nothing is kept, and a second one runs once the coefficients are known.
        instantiate: True if norms are measured from each example's gradient. With one pass it is kept, and users may
            read it.
    """

    name: str
    one_pass: bool
    instantiate: bool

    def refuse(self, trainable: TrainableParameters) -> None:
        """Raise ValueError if the mode is not exact for parameters that are sharded or split like these."""
        if self.one_pass and self.instantiate and trainable.parallel:
            raise ValueError(
                f"clipping mode '{self.name}' provides whole gradients, which no process of a tensor-parallel model "
                "has. Use clipping_mode='auto' or 'book_keeping'."
            )

    def begin(
        self,
        forward: ForwardPass,
        groups: Sequence[ParameterGroup],
        clip: Clip,
        sums: GradientSums | None,
        graph: LossGraph,
        plan: Plan | None = None,
    ) -> BackwardPass:
        """Begin a backward pass over ``forward``.

        Args:
            groups: The groups of parameters that are clipped separately.
            clip: Computes coefficients from norms.
            sums: Receives the clipped sums; None to measure only.
            graph: Can run a further backward pass.
            plan: The parameters for which instances are kept; None leaves the choice to the terms.
        """
        if self.one_pass:
            return KeptTerms(forward, groups, clip, sums, instantiate=self.instantiate, plan=plan)
        (group,) = groups  # several groups were refused with this mode
        return _FirstPass(self, forward, group, clip, sums, graph, plan)


MODES = {
    mode.name: mode
    for mode in (
        Mode("book_keeping", one_pass=True, instantiate=False),
        Mode("ghost", one_pass=False, instantiate=False),
        Mode("fast_gradient", one_pass=False, instantiate=True),
        Mode("per_sample", one_pass=True, instantiate=True),
    )
}


def choose_mode(name: str, model: nn.Module, clipping: ClippingFunction | None = None) -> Mode:
    """Return the mode for ``name``. "auto" is book-keeping, or ghost if activations are checkpointed (kept terms would
    undo that) and ``clipping`` uses one norm for all parameters.

    The choice depends only on the model's configuration, so it is the same on every rank.
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
