"""The state that a forward pass may leave behind in a model, outside of what is trained.

A buffer, a frozen weight or an attribute that one batch changes carries its examples to the next one, past clipping
and noise: dynamic rotary embeddings keep the longest length seen, a model may switch its attention for good.
:class:`ModelState` compares the model before and after every batch. What held numbers, tensors or nothing is put back,
so that no later batch sees it, and so is a table of positions that grew, which a memory of examples would do, too.
Where other buffers, weights, words or switches changed, this training is refused for good, and they are put back for
another (:mod:`.leftovers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..mechanism.values import equal_or_nan
from .conditions import Conditions
from .errors import HOW_TO_UNCOMPILE, is_compiled, named
from .leftovers import SMALL, Written, content_of, put_back, refuse_marked
from .places import HOOK_FLAGS, HOOKS, entries_of, ids_and_lengths_of, ids_of, places_in, values_of
from .settings import Settings, differing, rewritten
from .settle import settle_dict, settle_hooks, settle_list

_DRAWS_BETWEEN = 16  # looks at a model whose numbers change, after the first
_SAMPLED = 16  # numbers of each trained weight that are compared with every physical batch of a draw
_WORDS_AT_ONCE = 8  # changes of words inside attributes that count at once; later ones as those of numbers do


class ModelState:
    """The buffers, frozen parameters and plain attributes of a model.

    Args:
        model: Its modules' attributes are watched, those of objects they hold (configurations) and the content of
            lists, dicts and sets.
        conditions: They are given what must be read from the device.
        watch_parameters: False where frozen parameters change in the forward pass by themselves (FSDP2 gathers them).
        is_alone: False where processes share parameters, and must check the model together. A user's change counts
            there only if it is a class, mode, hook, method, word or switch of a module itself, as all of them make it.
        local: Returns the part of a parameter that this process holds.

    Raises:
        ValueError: a batch of an earlier training left something in the model that could not be put back.
    """

    def __init__(
        self,
        model: nn.Module,
        conditions: Conditions,
        *,
        watch_parameters: bool = True,
        is_alone: bool = True,
        local: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ):
        self.model, self._conditions, self._watch_parameters = model, conditions, watch_parameters
        self._is_alone, self._local = is_alone, local
        self._noted = self._is_in_draw = False
        self._held: Written = []  # the trained parameters and all shards, after the first sum of the draw
        self._sample = torch.zeros(0)  # some of their numbers
        # parameters, some of their numbers and small buffers, as a draw was given
        self._given: tuple[Written, torch.Tensor, Written] | None = None
        self.paused = False  # while a check runs the model, which compares for itself
        self._settings: Settings | None = None  # when it was asked last whether the model runs otherwise
        self._asked: list[int | None] = []  # the versions of tensors then
        self._other_numbers: list[str] = []  # that changed and were not looked at
        self._draws, self._looked_at = 0, -_DRAWS_BETWEEN  # in draw
        self._changes_of_words = 0
        self._weights: Written | None = None  # the large frozen parameters, as the draw found them
        refuse_marked(model)
        self._record()

    @property
    def is_watching(self) -> bool:
        """True while a batch is under way."""
        return self._noted or self.paused

    def before_forward(self) -> None:
        """Note the state, if no batch is under way. What was changed between draws is the user's own doing. Between
        the physical batches of one draw it would be another model for some examples, and which those are, and how many
        such batches there are, is private: that counts as the batch's doing."""
        if self._noted or self.paused:
            return
        if self._is_in_draw:
            self.expect_unchanged()
        self._is_in_draw = True
        if self._is_same_by_identity():
            self._note_contents()
        else:
            self._record()
        self._trained_versions = [version_of(p) for p in self._trained]
        self._noted = True
        if self._weights is None:
            self._weights = _contents(self._large_weights)

    def begin_draw(self) -> None:
        """Note large frozen parameters anew at the next forward pass. What was written between draws is the user's own
        doing, or else that of a batch of another training."""
        refuse_marked(self.model)
        self._weights = None
        self.end_draw()
        self._draws += 1

    def give_draw(self) -> None:
        """The loop is given the examples of a draw: what it writes to the model until the first forward pass may tell
        of them. Note small buffers, and some numbers of each parameter."""
        parameters = self.model.named_parameters() if self._watch_parameters else ()
        named = [(name, p, None) for name, p in parameters if _is_plain(self._local(p.detach()))]
        buffers = _contents((name, t) for name, t in self.model.named_buffers() if _is_small(t))
        self._given = named, self._sample_of(named), buffers

    def expect_as_given(self) -> None:
        """Expect that nobody wrote to the model since its draw was given."""
        if self._given is None:
            return
        (named, before, buffers), self._given = self._given, None
        sample = self._sample_of(named)
        self._conditions.expect(_is_same(sample, before), lambda: _refuse_written(named, sample != before))
        self._expect_same(buffers)
        now = dict(self.model.named_buffers())
        if replaced := [(name, now.get(name), None) for name, t, _ in buffers if now.get(name) is not t]:
            lost = put_back(self.model, replaced)
            self._conditions.refuse_for_good(lambda: _refuse(lost, lost))

    def hold_weights(self, *, is_last: bool) -> None:
        """After the sum of a physical batch note what the trained parameters hold, and all shards, or expect after
        the others of its draw that they hold it. What is written through ``.data``, or to shards, leaves no other
        trace.

        All numbers are compared after the last one, since it takes as long as to read them, and a few after each.
        """
        if self._held and is_last:
            self._expect_same(self._now(self._held))
        elif self._held:
            sample, before, held = self._sample_of(self._held), self._sample, self._held
            self._conditions.expect(_is_same(sample, before), lambda: _refuse_written(held, sample != before))
        elif not is_last:
            named = self.model.named_parameters()
            held = [(name, p) for name, p in named if p.requires_grad or not self._watch_parameters]
            self._held = [(n, p, content_of(local)) for n, p in held if _is_plain(local := self._local(p.detach()))]
            self._sample = self._sample_of(self._held)

    def _sample_of(self, held: Written) -> torch.Tensor:
        """(n, _SAMPLED): the first numbers of each."""
        parts = [local.detach().reshape(-1)[:_SAMPLED].float() for _, local, _ in self._now(held)]
        padded = [nn.functional.pad(x, (0, _SAMPLED - len(x))).to(parts[0].device) for x in parts]
        return torch.stack(padded) if padded else torch.zeros(0, _SAMPLED)

    def expect_same_weights(self) -> None:
        """Expect that large frozen parameters hold what they held at the first forward pass of the draw. It is asked
        once a draw, since it reads them all."""
        weights, self._weights = self._weights, None
        self._expect_same(weights or [])

    def end_draw(self) -> None:
        """What is changed from now on is the user's own doing."""
        self._is_in_draw, self._held, self._given = False, [], None

    def changed_settings(self) -> list[str]:
        """Returns what lets the model compute otherwise than when this was asked last, by the user's doing.

        A class, mode, method, hook, word or switch of a module that is another one counts at once. So do the first
        eight changes of words inside its attributes, and the first change of a number, a buffer or a frozen weight.
        Those may change with every step (a task that takes turns, a temperature, a teacher that follows its pupil), so
        that later ones count once in 16 draws.
        """
        if self.paused or self._noted:
            return []
        if self._settings is None or not self._is_same_by_identity():
            now = Settings.of(self.model, in_depth=self._is_alone)
            before, self._settings = self._settings or now, now
            inside = differing(before.words_inside, now.words_inside) + rewritten(before.inferred, now.inferred)
            self._changes_of_words += bool(inside)
            at_once = differing(before.words, now.words)
            if inside and self._changes_of_words <= _WORDS_AT_ONCE:
                at_once += inside
            if at_once:
                self._other_numbers = []
                return at_once
            # a batch or a check that has written since noted the versions again
            asked, self._asked = self._asked, [version_of(t) for t in self._tensors]
            is_written = self._asked not in (asked, self._versions) and before is not now
            others = differing(before.numbers, now.numbers) + ["a buffer or a frozen weight"] * is_written
            self._other_numbers += inside + others * self._is_alone
        if not self._other_numbers or self._draws - self._looked_at < _DRAWS_BETWEEN:
            return []
        others, self._other_numbers, self._looked_at = self._other_numbers, [], self._draws
        return list(dict.fromkeys(others))

    def require_unchanged(self) -> None:
        """Put back what may be; raise ValueError that names what else the batch changed."""
        self.expect_unchanged()
        self._conditions.require()

    def expect_unchanged(self) -> None:
        """Put back what may be; leave it to the conditions to tell what else the batch changed."""
        if self.paused:
            return
        self._noted = False
        rewritten = [
            p
            for p, version in zip(self._trained, self._trained_versions, strict=True)
            if version_of(p) != version and not self._is_held(p)
        ]
        if not rewritten and self._is_same_by_identity() and not self._rewritten_arrays():
            self._expect_same(self._contents)
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        written: Written = [(names.get(id(p), "a parameter"), p, None) for p in rewritten] + self._written_in_place()
        changed = list(dict.fromkeys([name for name, *_ in written] + self._settle()))
        lost = put_back(self.model, written)
        self._record()
        if changed:
            self._conditions.refuse_for_good(lambda: _refuse(changed, lost))

    def _is_held(self, parameter: nn.Parameter) -> bool:
        """Whether a trained parameter, which was written to, is known to hold what it held after the draw's first sum:
        an average that came and went, a constraint that it meets."""
        held = [each for each in self._held if each[1] is parameter]
        return bool(held) and bool(_all(_are_same(self._now(held))))

    @torch.no_grad()
    def _now(self, held: Written) -> Written:
        """The same of the tensors that parameters are now, of which this process holds its part."""
        return [(name, self._local(p), content) for name, p, content in held]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the model runs without being trained: in another mode, or with adapters off. It may leave nothing
        behind, and what is trained next is compared with what was trained before. Does nothing while a batch is under
        way."""
        if self.is_watching:
            yield
            return
        before = dict(vars(self))
        self.end_draw()
        self.before_forward()
        try:
            yield
        finally:  # after an error, too, what is trained next finds what was trained before
            self.expect_unchanged()
            if before["_is_in_draw"]:
                vars(self).update(before)
            else:
                self.end_draw()
                self._given = before["_given"]
        self._conditions.require()

    @contextmanager
    def during_check(self) -> Iterator[None]:
        """A check runs the model on made-up input of the shapes of a private batch, so what it leaves behind tells of
        those.

        Checks put the content of buffers back themselves.
        """
        self.before_forward()
        paused, self.paused = self.paused, True
        try:
            yield
        finally:  # also after an error, so that nobody takes what a check wrote and put back for a batch's doing
            self.paused = paused
            self._versions = [version_of(t) for t in self._tensors]
            self._trained_versions = [version_of(p) for p in self._trained]
        conditions, self._conditions = self._conditions, Conditions()  # what a check finds is told by its own error
        try:
            self.require_unchanged()
        finally:
            self._conditions = conditions

    @contextmanager
    def holding_other_numbers(self) -> Iterator[None]:
        """Inside, tensors hold other numbers than those that were noted, and :meth:`holds_the_same` is about these."""
        noted = self._contents, self._weights
        self._contents, self._weights = _contents(self._plain), _contents(self._large_weights)
        try:
            yield
        finally:
            self._contents, self._weights = noted

    def holds_the_same(self, tensor: torch.Tensor) -> bool:
        """Returns True if ``tensor`` is known to hold what it held. A weight that is written onto itself does, as by
        adapters on the weights of experts (peft's ``target_parameters``)."""
        noted = [each for each in [*self._contents, *(self._weights or [])] if each[1] is tensor]
        return bool(noted) and bool(_all(_are_same(noted)))

    # ---- comparing: a few microseconds a module ----

    def _record(self) -> None:
        _refuse_compiled(self.model)
        self._places = list(places_in(self.model, self._watch_parameters))
        self._holders = [place.holder for place in self._places]
        self._before = [
            dict(h) if isinstance(h, dict) else list(h) for h in self._holders
        ]  # kept alive, so that no other object takes over an id
        self._ids = ids_of(self._before)
        self._modules = list(self.model.modules())
        self._classes = list(map(type, self._modules))
        self._hooks = [
            (hooks, dict(hooks)) for m in self._modules for hooks in map(vars(m).get, HOOKS) if hooks is not None
        ]
        self._hook_holders = [hooks for hooks, _ in self._hooks]
        self._hook_ids = ids_and_lengths_of(self._hook_holders)
        self._hook_flags = [
            (flags, dict(flags)) for m in self._modules for flags in map(vars(m).get, HOOK_FLAGS) if flags
        ]
        self._tensors = list({id(t): t for t in self._frozen()}.values())
        self._versions = [version_of(t) for t in self._tensors]
        named = [
            (place.name_of(key), value)
            for place, before in zip(self._places, self._before, strict=True)
            if not place.holds_buffers
            for key, value in entries_of(before)
        ]
        watched = {id(t): (name, t) for name, t in [*named, *self.model.named_buffers()] if _has_plain_content(t)}
        large = {i for i, (_, t) in watched.items() if isinstance(t, nn.Parameter) and t.numel() > SMALL}
        self._plain = [each for i, each in watched.items() if i not in large]
        self._large_weights = [each for i, each in watched.items() if i in large]
        self._named_arrays = [(name, a) for name, a in named if isinstance(a, np.ndarray) and not a.dtype.hasobject]
        self._note_contents()
        self._trained = [p for p in self.model.parameters() if p.requires_grad] if self._watch_parameters else []
        self._trained_versions = [version_of(p) for p in self._trained]

    def _note_contents(self) -> None:
        self._contents = _contents(self._plain)
        self._arrays = [(name, a, content_of(a)) for name, a in self._named_arrays]

    def _frozen(self) -> Iterator[torch.Tensor]:
        yield from self.model.buffers()
        held = (v for v in chain.from_iterable(map(values_of, self._before)) if isinstance(v, torch.Tensor))
        yield from (v for v in held if not (isinstance(v, nn.Parameter) and v.requires_grad))
        if self._watch_parameters:
            yield from (p for p in self.model.parameters() if not p.requires_grad)

    def _is_same_by_identity(self) -> bool:
        """Without a look at the content of tensors, which would wait for the device."""
        return (
            list(map(type, self._modules)) == self._classes
            and ids_and_lengths_of(self._hook_holders) == self._hook_ids
            and ids_of(self._holders) == self._ids
            and [version_of(t) for t in self._tensors] == self._versions
        )

    def _rewritten_arrays(self) -> Written:
        return [each for each in self._arrays if content_of(each[1]).tobytes() != each[2].tobytes()]

    def _rewritten_buffers(self) -> Written:
        """Tensors and arrays whose content is another one, although they are the same; ``.data``, NumPy and batch
        normalisation write without a trace."""
        same = _are_same(self._contents)
        others = _others(self._contents, same) if same and not _all(same) else []
        return self._rewritten_arrays() + others

    def _expect_same(self, contents: Written) -> None:
        changed: list[str] = []
        lost: list[str] = []

        def settle() -> None:
            others = _others(contents, same)
            changed.extend(name for name, *_ in others)
            lost.extend(put_back(self.model, others))

        if same := _are_same(contents):
            self._conditions.expect(_all(same), lambda: _refuse(changed, lost), put_back=settle)

    # ---- what changed ----

    def _settle(self) -> list[str]:
        """Put back what attributes and containers were, and return the names of those whose change is refused."""
        changed: list[str] = []
        for hooks, before in self._hooks:  # the attribute by which a model knows of hooks that it registered goes, too
            settle_hooks(hooks, before)
        for flags, before in self._hook_flags:
            flags.update(before)
        for place, before in zip(self._places, self._before, strict=True):
            if ids_of([place.holder]) != ids_of([before]):
                changed += settle_dict(place, before) if isinstance(before, dict) else settle_list(place, before)
        return changed

    def _written_in_place(self) -> Written:
        changed = [t for t, version in zip(self._tensors, self._versions, strict=True) if version_of(t) != version]
        written = {id(t) for t in changed if not self.holds_the_same(t)}
        contents = {id(t): content for _, t, content in self._contents}
        names = [
            (name, t) for named in (self.model.named_buffers(), self.model.named_parameters()) for name, t in named
        ]
        for place, before in zip(self._places, self._before, strict=True):
            names += [(place.name_of(key), value) for key, value in entries_of(before)]
        return [(name, t, contents.get(id(t))) for name, t in names if id(t) in written] + self._rewritten_buffers()


def _has_plain_content(t: Any) -> bool:
    """Returns True for a tensor that nothing but a forward pass would write. The optimizer writes what is trained."""
    return _is_plain(t) and not (isinstance(t, nn.Parameter) and t.requires_grad)


def _is_small(t: torch.Tensor) -> bool:
    return _is_plain(t) and t.numel() <= SMALL


def _is_plain(t: Any) -> bool:
    return type(t) in (torch.Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_meta


def version_of(t: torch.Tensor) -> int | None:
    """Autograd's count of the writes to ``t``; None where it keeps none, as for weights that were quantized under
    ``torch.inference_mode``. Their content is compared."""
    return None if t.is_inference() else t._version


def _contents(named: Iterable[tuple[str, torch.Tensor]]) -> Written:
    return [(name, t, content_of(t)) for name, t in named]


def _are_same(contents: Written) -> list[torch.Tensor]:
    """Whether each holds what it held, as numbers on its device."""
    return [_is_same(content_of(t), content) for _, t, content in contents]


def _is_same(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if now.shape != before.shape or now.dtype != before.dtype:
        return torch.zeros((), dtype=torch.bool, device=before.device)
    return equal_or_nan(now, before).all()


def _all(same: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.to(same[0].device) for x in same]).all()


def _others(contents: Written, same: list[torch.Tensor]) -> Written:
    return [each for each, is_same in zip(contents, same, strict=True) if not is_same]


def _refuse(changed: Sequence[str], lost: Sequence[str]) -> None:
    """Raise ValueError that names what a batch changed, and what of it could not be put back."""
    others = f" (and {len(changed) - 1} more: {', '.join(changed[1:4])})" if len(changed) > 1 else ""
    way_out = (
        f"What '{lost[0]}' held before is not known, so the model may hold private data now: make it anew, from its "
        "original weights or from a checkpoint, and release neither this one nor a copy of it."
        if lost
        else "The model holds again what it held before, and may be trained anew; a copy that was made of it since "
        "may hold private data."
    )
    causes = (
        "Within a draw evaluate under torch.no_grad(). "
        if all(name.rpartition(".")[2] == "training" for name in changed)
        else "Set a rope_type other than 'dynamic' or attention_type='original_full', or switch off the running "
        "statistics, counters or caches that forward writes. "
    )
    raise ValueError(
        f"'{changed[0]}'{others} of the model changed in a forward or backward pass, between a batch and its forward "
        "pass, or between two physical batches of a draw, and not by the optimizer: it would carry private data to "
        "later batches, or to the others of its own, without clipping and "
        f"noise. {causes}If your own loop writes it, do that after "
        "optimizer.step() has ended a draw ('if engine.has_stepped:'), or after "
        f"engine.drop_draw(). This training releases nothing more. {way_out}"
    )


def _refuse_written(held: Written, differs: torch.Tensor) -> None:
    written = [name for (name, *_), numbers in zip(held, differs.tolist(), strict=True) if any(numbers)]
    _refuse(written, written)


def _refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError for a module that torch.compile took over, before the model was attached or since."""
    for path, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(f"{named(path, module)} is compiled by torch.compile, {HOW_TO_UNCOMPILE}")
