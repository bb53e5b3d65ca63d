"""What decides how a model computes, besides what is trained: it is compared between draws."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .leftovers import MARK
from .places import HOOKS, INTERNAL, SCALARS, Place, entries_of, is_ours, places_in

# Entries of a configuration that transformers and peft fill in where they are empty, from labels, weights or a class,
# in a forward pass with labels and when a model is saved
_INFERRED = frozenset({"problem_type", "architectures", "dtype", "torch_dtype", "base_model_name_or_path"})
_Entries = dict[tuple[str, Any], Any]  # by path and name
_NOTHING = object()
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WORDS = (bool, str, *_FUNCTIONS)


class Settings(NamedTuple):
    """What decides how a model computes, besides what is trained.

    Attributes:
        words: For every module its class, mode, hooks that are not a clipper's, and the methods, words and switches
            among its attributes.
        words_inside: Those in the objects and containers that attributes hold, and empty places.
        inferred: The words of configurations that count where they are replaced, and not where an empty place is
            filled.
        numbers: The numbers in all of these, and which buffers, frozen parameters and other tensors there are.
    """

    words: _Entries
    words_inside: _Entries
    inferred: _Entries
    numbers: _Entries

    @classmethod
    def of(cls, model: nn.Module, *, in_depth: bool) -> Settings:
        """Without ``in_depth`` the words of modules alone."""
        found = cls({}, {}, {}, {})
        of_modules: set[int] = set()
        for path, module in model.named_modules():
            hooks = [h for name in HOOKS for h in vars(module).get(name, {}).values() if not is_ours(h)]
            found.words.update({(path, "__class__"): type(module), (path, "training"): module.training})
            found.words[path, "_forward_hooks"] = hooks
            found.words.update({(path, k): v for k, v in _own(vars(module)) if isinstance(v, _WORDS)})
            of_modules.add(id(vars(module)))
        for place in places_in(model, True) if in_depth else ():
            for key, value in _own(place.holder):
                if isinstance(value, _WORDS) and id(place.holder) in of_modules:
                    continue
                if value is None or isinstance(value, (bytes, type, *_WORDS)):
                    words = found.inferred if _is_inferred(place, key) else found.words_inside
                    words[place.path, key] = value
                elif isinstance(value, SCALARS):
                    found.numbers[place.path, key] = value
                elif isinstance(value, torch.Tensor) and not value.requires_grad:
                    found.numbers[place.path, key] = id(value)
        return found


def _is_inferred(place: Place, key: Any) -> bool:
    is_configuration = hasattr(place.of, "to_dict") and hasattr(place.of, "save_pretrained")
    return is_configuration and not _INFERRED.isdisjoint((key, place.path.rpartition(".")[2]))


def differing(before: _Entries, now: _Entries) -> list[str]:
    """The names of entries that came, went or changed."""
    pairs = [(key, before.get(key, _NOTHING), now.get(key, _NOTHING)) for key in dict.fromkeys([*before, *now])]
    return [f"'{path}.{name}'".replace("'.", "'") for (path, name), a, b in pairs if a is not b and a != b]


def rewritten(before: _Entries, now: _Entries) -> list[str]:
    """Of these the ones that were not empty before."""
    known = {key: value for key, value in before.items() if value is not None}
    return differing(known, {key: value for key, value in now.items() if key in known})


def _own(holder: Any) -> Iterator[tuple[Any, Any]]:
    """The entries that are neither torch's own nor a mark of ours."""
    return ((key, value) for key, value in entries_of(holder) if key not in INTERNAL and key != MARK)
