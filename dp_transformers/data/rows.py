"""A row is a row: what the examples of a draw, and the batches collated from them, must be for clipping by row to
bound an example.

Each function looks at what was loaded or collated just now. :class:`~dp_transformers.data.draws.LogicalBatches` calls
them for every draw, so they hold for both loops, for workers, and for data sets and collators that change while
training goes on.
"""

from __future__ import annotations

import copy
import functools
import itertools
import numbers
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_leaves_with_path

from ..mechanism.values import equal_or_nan
from ..runtime.randomness import generators_apart

# as models of transformers call texts and sounds
MAIN_INPUTS = ("input_ids", "input_values", "input_features", "inputs_embeds")
_PACKED = ("seq_lengths", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # what packing and flattening collators add
_PACKING = (
    "Packing joins several examples in one row, so the norm of a row is not the norm of an example. Switch packing, "
    "padding_free and flattening collators off, and use one that pads (DataCollatorWithPadding, or that of your "
    "trainer without packing)."
)

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Padding:
    """Padding that one row of a physical batch was given, in some of its columns.

    Attributes:
        row: Which row of the batch.
        own_t: (T,) bool, the positions that are the row's own.
        by_others: The row is shorter when it is collated alone, so others of its batch decide how much padding it
            gets. False: it was padded before the collator saw it, to one length or to that of a longer example.
        fills: Whether some row of the batch has no padding.
        columns: The columns that are padded so, and in which dimensions, beside that of the rows; None where that is
            not known.
    """

    row: int
    own_t: torch.Tensor
    by_others: bool
    fills: bool
    columns: Mapping[str, tuple[int, ...]] | None = None

    @property
    def length(self) -> int:
        return len(self.own_t)

    @property
    def kind(self) -> tuple:
        """Paddings of one kind are checked once: columns, side, and lengths to within a factor of two."""
        names = None if self.columns is None else frozenset(self.columns)
        own = self.own_t.nonzero().flatten().tolist() or [0]
        sides = own[0] > 0, own[-1] < self.length - 1, len(own) < own[-1] - own[0] + 1
        return (names, self.by_others, *sides, self.length.bit_length(), len(own).bit_length())


def leaves(batch: Any) -> list[tuple[str, Any]]:
    """Everything in a batch with its path, also inside mappings that are no dict (BatchEncoding, UserDict); arrays as
    tensors."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    if not isinstance(batch, torch.Tensor) and tree_is_leaf(batch) and hasattr(batch, "__dict__"):
        batch = vars(batch)  # an object of a class of the user's
    named = [
        ("/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), x)
        for path, x in tree_leaves_with_path(batch)
    ]
    return [
        (name, torch.from_numpy(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biuf" else x) for name, x in named
    ]


def main_input(example: Any) -> str | None:
    return next((name for name in MAIN_INPUTS if name in example), None) if isinstance(example, Mapping) else None


def require_one_each(indices: Sequence[int], examples: Sequence[Any], dataset: Any) -> None:
    """Raise ValueError unless the data set returned one row for each index."""
    if len(examples) != len(indices):
        raise ValueError(
            f"the data set ({type(dataset).__name__}) returned {len(examples)} rows instead of {len(indices)}, but "
            "each example must be one row, which is clipped by itself. If a transform cuts examples into windows "
            "(return_overflowing_tokens, stride) or leaves some out, do that before training (datasets.map, "
            "datasets.filter), and say with max_examples_per_person how many rows one person may then have."
        )


def require_known_to_nobody(parts: Sequence[Any]) -> None:
    """Raise ValueError for whoever is called among ``parts`` with a seed of its own, which whoever reads the
    configuration knows."""
    for part in parts:
        if not callable(part) or isinstance(part, type):
            continue
        seed = part.keywords.get("seed") if isinstance(part, functools.partial) else getattr(part, "seed", None)
        if isinstance(seed, numbers.Integral):
            name = getattr(part.func if isinstance(part, functools.partial) else part, "__name__", type(part).__name__)
            raise ValueError(
                f"the collator or the data set uses {name} with seed={seed}. If it draws random numbers from that "
                "seed, whoever knows it can tell more than epsilon allows. Leave the seed out (seed=None): it then "
                "draws from secret numbers. If it draws nothing, drop or rename that attribute."
            )


def generators(parts: Sequence[Any]) -> list[Any]:
    """The random generators among ``parts``."""
    return [part for part in parts if isinstance(part, GENERATORS)]


GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.Tensor,
    np.ndarray,
    types.ModuleType,
)
_PARTS, _ENTRIES = 1000, 64  # objects that are looked into, and entries of each container


def parts_of(owner: Any, *, without: Collection[str] = (), most: int = _PARTS) -> Iterator[Any]:
    """What ``owner`` is made of, nearest first: attributes, entries, closures, default arguments, module variables
    that a function uses; modules of torch, which may be large, after all else. Objects of the packages ``without`` are
    left out, and what they alone lead to, but for what they call. After ``most`` objects it ends."""
    seen, todo, modules = set(), deque([owner]), deque[Any]()
    while (todo or modules) and len(seen) < most:
        part = (todo or modules).popleft()
        if isinstance(part, _OPAQUE) or id(part) in seen:
            continue
        seen.add(id(part))
        if package_of(type(part)) in without:
            todo.extend(x for x in getattr(part, "__dict__", {}).values() if callable(x) and not isinstance(x, type))
            continue
        yield part
        for inner in itertools.islice(_inside(part), _ENTRIES):
            (modules if isinstance(inner, torch.nn.Module) else todo).append(inner)


def _inside(part: Any) -> Iterator[Any]:
    if isinstance(part, functools.partial):
        yield from (part.func, *part.args, *part.keywords.values())
    elif isinstance(part, (types.MethodType, types.BuiltinMethodType)):
        yield from (part.__self__, getattr(part, "__func__", None))
    elif isinstance(part, types.FunctionType) and not is_of_a_library(part):
        yield from (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values(), *vars(part).values())
        yield from (
            owner[name] if isinstance(owner, dict) else owner.cell_contents for name, owner in variables_of(part)
        )
    elif isinstance(part, type):
        yield from (
            value for cls in part.__mro__[:-1] if not is_of_a_library(cls) for value in list(vars(cls).values())
        )
    elif not isinstance(part, types.FunctionType) and package_of(type(part)) not in _CLOSED:
        of_torch = _OF_EVERY_MODULE if isinstance(part, torch.nn.Module) else ()
        for attributes in attributes_of(part):
            yield from [value for name, value in attributes.items() if name not in of_torch]
        yield from (getattr(part, slot, None) for cls in type(part).__mro__ for slot in _slots(cls))
        yield type(part)
    if isinstance(part, dict):
        yield from part.values()
    elif isinstance(part, (list, tuple, set, deque)):
        yield from part


def attributes_of(part: Any) -> list[dict[str, Any]]:
    """The dicts in which an object has its attributes; a module of torch has its buffers, weights and parts apart."""
    attributes = getattr(part, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    is_module = isinstance(part, torch.nn.Module)
    return [attributes, *(attributes[name] for name in _REGISTERED if is_module and name in attributes)]


_REGISTERED = ("_buffers", "_parameters", "_modules")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))  # hooks and the like


def variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of its closure, each with its cell, and those of its module and of others that it names, with the
    dict of these. Functions of libraries have none."""
    if is_of_a_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell
    names, variables = set(_names_in(function.__code__)), function.__globals__
    for name in sorted(names & variables.keys()):
        yield name, variables
        if isinstance(module := variables[name], types.ModuleType) and not is_of_a_library(module):
            yield from ((each, vars(module)) for each in sorted(names & vars(module).keys()))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses which are not its own, also those in its comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def is_of_a_library(thing: Any) -> bool:
    """Whether a module, a class or a function keeps nothing of rows, and leads to nothing that does."""
    package = package_of(thing)
    return package in _LIBRARIES or (isinstance(thing, types.ModuleType) and package in sys.stdlib_module_names)


_LIBRARIES = frozenset(
    [
        "abc",
        "builtins",
        "collections",
        "datasets",
        "functools",
        "numpy",
        "torch",
        "transformers",
        "typing",
        "typing_extensions",
    ]
)


_CLOSED = ("pyarrow", "pandas", "tokenizers")  # packages whose objects are not looked into


def package_of(thing: Any) -> str:
    """The first part of the name of a module, or of the module that a class or a function is defined in."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""  # some types of Cython have a descriptor there


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def refuse_packed(batch: Any, examples: Sequence[Any]) -> None:
    """Raise ValueError for a row that holds several examples, or fewer or more rows than examples."""
    found = dict(leaves(batch))
    columns = [*(name.partition("/")[0] for name in found), *(examples[0] if isinstance(examples[0], Mapping) else ())]
    packed = next((name for name in columns if name in _PACKED), None)
    if packed is not None:
        raise ValueError(f"the batch has '{packed}', as packed rows have. {_PACKING}")
    positions = found.get("position_ids")
    if (
        isinstance(positions, torch.Tensor)
        and positions.dim() == 2
        and _restarts(positions, found.get("attention_mask"))
    ):
        raise ValueError(
            f"the position_ids of a row start again at 0 in the middle of it, as packed rows have. {_PACKING}"
        )
    rows = next(
        (len(x) for name, x in found.items() if name in MAIN_INPUTS and isinstance(x, torch.Tensor) and x.dim()), None
    )
    if rows == 1 < len(examples):
        raise ValueError(f"the collator made one row of {len(examples)} examples, and not one of each. {_PACKING}")


def _restarts(positions_bt: torch.Tensor, mask: Any) -> bool:
    starts = (positions_bt[:, 1:] == 0) & (positions_bt[:, :-1] > 0)
    if isinstance(mask, torch.Tensor) and mask.shape == positions_bt.shape:
        starts &= (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(starts.any())


def size_of(example: Any) -> int:
    """How long an example is, whatever it is made of: the numbers and characters in its columns."""
    return sum(sizes_of(example).values())


def sizes_of(example: Any) -> dict[Any, int]:
    """The numbers and characters in each column of an example."""
    columns = (
        example.items()
        if isinstance(example, Mapping)
        else enumerate(example if isinstance(example, (tuple, list)) else [example])
    )
    return {name: _size_of_column(x) for name, x in columns}


def _size_of_column(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return x.numel()
    if isinstance(getattr(x, "size", None), int):  # an array of numpy
        return x.size
    if isinstance(x, (list, tuple)) and len(x) and hasattr(x[0], "__len__"):
        return sum(map(len, x))
    return len(x) if hasattr(x, "__len__") else 1


def filled_columns(example: Any) -> frozenset:
    """The columns of an example that hold something."""
    columns = (
        example.items()
        if isinstance(example, Mapping)
        else enumerate(example if isinstance(example, (tuple, list)) else [example])
    )
    return frozenset(name for name, x in columns if x is not None and _size_of_column(x))


def columns_of(batch: Any, size: int) -> dict[str, str] | None:
    """The names of what a batch of ``size`` rows holds, with the types of tensors that have numbers ("" elsewhere);
    None for a list that may be one of columns, or of rows. What a list holds, which may be an entry for each row, has
    no name, but for those of a batch that is itself a list of columns."""
    may_be_rows = isinstance(batch, list) and len(batch) == size
    if may_be_rows and not all(isinstance(x, torch.Tensor) and x.dim() and len(x) == size for x in batch):
        return None
    firsts = 1 if isinstance(batch, (list, tuple)) else 0  # parts of a path that may be a place
    columns: dict[str, str] = {}
    for path, x in leaves(batch):
        parts = path.split("/")
        place = next((i for i, part in enumerate(parts) if i >= firsts and part.isdigit()), len(parts))
        is_typed = place == len(parts) and isinstance(x, torch.Tensor) and x.numel()
        if x is not None:
            columns["/".join(parts[:place])] = str(x.dtype) if is_typed else ""
    return columns


def refuse_other_columns(columns: Mapping[str, str] | None, others: Mapping[str, str] | None) -> None:
    """Raise ValueError unless a batch has the same columns, of the same types, as one of other examples, as far as
    both are known."""
    if columns is None or others is None:
        return
    names = columns.keys() ^ others.keys()
    types = {
        name for name in columns.keys() - names if columns[name] and others[name] and columns[name] != others[name]
    }
    if differing := sorted(names) or sorted(types):
        raise ValueError(
            f"{'whether' if names else 'of what type'} '{differing[0]}' is in a batch depends on what examples are in "
            "it: the collator returns it where some example has one, or needs one, or as the first of them has it. So "
            "each example has a say in what is computed for the others, beyond the clipping bound. Return it in every "
            "batch alike, with a constant for examples that have none, or take physical batches of one row."
        )


def mask_of(batch: Any) -> torch.Tensor | None:
    """(B, T) bool: which positions are not padding, as the batch itself says."""
    found = dict(leaves(batch)).get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(found, torch.Tensor) or found.dim() < 2 or found.is_floating_point():
        return None
    mask = found != 0
    # choices of an example are padded to each other's length anyway
    return mask.flatten(1, -2).any(1) if mask.dim() > 2 else mask


class _Clones(TorchFunctionMode):
    """Inside, ``copy.deepcopy`` copies the numbers of a tensor alone. Torch copies all that its memory holds, which is
    the whole data set where rows are views of one tensor."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return args[0].detach().clone().requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))


def copied(examples: Any) -> Any:
    """Copies of examples, for collators, which may change what they are called with."""
    with _Clones():
        return copy.deepcopy(examples)


def paddings_by_others(batch: Any, size: int, row: int, example: Any, collate: Collate) -> list[Padding]:
    """How ``row`` of ``size``, made of ``example``, was padded to the lengths of others: it is collated again, without
    others. Columns with the same own positions are padded together.

    Raises:
        ValueError: other examples decide over its shape in another way.
    """
    before = generators_apart()
    two = collate([copied(example), copied(example)])  # since some collators cannot do with one
    is_random = generators_apart() != before or _differ(two)
    if is_random:  # what is no constant may be trusted to say what is padding
        made = (collate([copied(example), copied(example)]) for _ in range(_TRIES))
        is_random = any(_hides(each) for each in itertools.chain([batch, two], made))
    alone, follows_mask = dict(leaves(two)), _Followed.of(mask_of(batch), mask_of(two), row, is_random=is_random)
    columns: dict[tuple, dict[str, tuple[int, ...]]] = {}
    others = []
    for name, x in leaves(batch):
        both = _beside(x, alone.get(name), size)
        if both is None:
            continue
        pairs = enumerate(zip(both[0].shape[1:], both[1].shape[1:], strict=True), start=1)
        lengths = {dim: (n, own) for dim, (n, own) in pairs if n != own}
        if not lengths:
            continue
        place = None
        if len(lengths) == 1:
            if follows_mask is not None and follows_mask.lengths in lengths.values():
                place = follows_mask.place
                if bool(place[1].all()):  # of random rows that happen to be as long
                    continue
                if not is_random and not _holds_the_same(*both, *place):
                    place = None
            else:
                place = _found_again(*both, row)
        if place is None:
            others.append((name, *both, lengths))
        else:
            columns.setdefault((place[0], *place[1].tolist()), {})[name] = (*lengths,)
    known = {(len(own), sum(own)) for _, *own in columns}
    for name, x in () if is_random else leaves(batch):
        if _beside(x, alone.get(name), size) is None:
            _require_beginning(name, x, alone.get(name), known)
    for name, x, y, lengths in others:
        if len(lengths) == 1 or not known.issuperset(lengths.values()):  # no mask of pairs of positions
            raise ValueError(
                f"'{name}' of an example has shape {tuple(y.shape[1:])} when it is collated alone, and "
                f"{tuple(x.shape[1:])} in its batch, where its own numbers are not found again: other examples decide "
                "how it is cut, resized or padded. Give all examples one size before they are collated, or let the "
                "collator return an attention_mask that says what is padding."
            )
        for (_, *own), dims in columns.items():
            if padded := tuple(dim for dim, each in lengths.items() if each == (len(own), sum(own))):
                dims[name] = padded
    return [Padding(at, torch.tensor(own), True, True, dims) for (at, *own), dims in columns.items()]


class _Followed(NamedTuple):
    """A row, and the positions of it that its attention mask says are its own; and the lengths of the mask in the
    batch, and where the row is collated alone, which other columns share."""

    place: tuple[int, torch.Tensor]
    lengths: tuple[int, int]

    @classmethod
    def of(
        cls, mask_bt: torch.Tensor | None, alone_mask_bt: torch.Tensor | None, row: int, *, is_random: bool
    ) -> _Followed | None:
        """Where random numbers may make a row longer or shorter when it is collated alone, only the mask in the batch
        tells its own length, and that row is taken of which it hides most."""
        if mask_bt is None or alone_mask_bt is None or mask_bt.shape[1] == alone_mask_bt.shape[1]:
            return None
        lengths, count_b, own = (mask_bt.shape[1], alone_mask_bt.shape[1]), mask_bt.sum(1), int(alone_mask_bt[0].sum())
        if is_random:
            row = int(count_b.argmin())
            return cls((row, mask_bt[row]), lengths)
        if lengths[0] < lengths[1]:
            return None
        if int(count_b[row]) != own:  # a collator may put rows in another order
            row = int((count_b - own).abs().argmin())
        # not those that the mask hides where the row is alone (pad_to_multiple_of): other columns may be longer there
        own_t = _own_positions(mask_bt[row], alone_mask_bt[0], 0)
        return cls((row, mask_bt[row] if own_t is None else own_t), lengths)


_TRIES = 4  # in which a row and its copy may be drawn of two lengths


def _hides(batch: Any) -> bool:
    """Whether the mask of a batch hides something."""
    mask_bt = mask_of(batch)
    return mask_bt is not None and not bool(mask_bt.all())


def _differ(two: Any) -> bool:
    """Whether a row and its copy differ in some column."""
    columns = (x for _, x in leaves(two) if isinstance(x, torch.Tensor) and x.dim() and len(x) == 2)
    return any(not same_numbers(x[0], x[1]) for x in columns)


def _beside(x: Any, alone: Any, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A column of a batch, and that of a row with its copy, with the rows in their first dimension; None where these
    are not known."""
    if not (isinstance(x, torch.Tensor) and isinstance(alone, torch.Tensor) and x.dim() == alone.dim() > 1):
        return None
    dim = next((d for d in (0, 1) if x.shape[d] == size and alone.shape[d] == 2), None)
    return None if dim is None else (x.movedim(dim, 0), alone.movedim(dim, 0))


def _require_beginning(name: str, x: Any, alone: Any, lengths: Collection[tuple[int, int]]) -> None:
    """Raise ValueError if a column without rows, as long as the longest row, does not begin, or end, with what it is
    for a row ``alone``.

    Args:
        lengths: How long columns with rows are in the batch, and where that row is alone.
    """
    if not (isinstance(x, torch.Tensor) and isinstance(alone, torch.Tensor) and x.dim() == alone.dim()):
        return
    pairs = [*zip(x.shape, alone.shape, strict=True)]
    if x.shape == alone.shape or not all(n == own or (n, own) in lengths for n, own in pairs):
        return
    first, last = (tuple(slice(own) for own in alone.shape), tuple(slice(n - own, n) for n, own in pairs))
    if not any(same_numbers(x[part], alone) for part in (first, last)):
        raise ValueError(
            f"'{name}', which the collator gives for the whole batch, holds other numbers where the longest row is a "
            "longer one, and not more of them: all rows would be computed with what one of them decides, beyond the "
            "clipping bound. Compute it for each row by itself, from its own length."
        )


def _holds_the_same(x: torch.Tensor, alone: torch.Tensor, row: int, own_t: torch.Tensor) -> bool:
    """Whether a row of a column holds at these positions the numbers that it has ``alone``, where it has as many."""
    dim = next(d for d in range(1, alone.dim()) if x.shape[d] != alone.shape[d])
    if (len(own_t), int(own_t.sum())) != (x.shape[dim], alone.shape[dim]):
        return True
    own = own_t.nonzero().flatten().to(x.device)
    return same_numbers(x[row].index_select(dim - 1, own), alone[0])


def _found_again(x: torch.Tensor, alone: torch.Tensor, row: int) -> tuple[int, torch.Tensor] | None:
    """In which row of a column, and where there, the row lies that is collated ``alone``, which is shorter in one
    dimension; None if it is not found."""
    dim = next(d for d in range(alone.dim() - 1) if x.shape[d + 1] != alone.shape[d + 1])
    if x.shape[dim + 1] < alone.shape[dim + 1]:
        return None
    for at in sorted(range(len(x)), key=lambda at: at != row):  # a collator may put rows in another order
        if (own_t := _own_positions(x[at], alone[0], dim)) is not None:
            return at, own_t
    is_random = not same_numbers(alone[0], alone[1])
    own_t = _beside_constant(x[row], alone[0], dim) if is_random else None
    return None if own_t is None else (row, own_t)


def same_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and numbers; nan is one."""
    return x.shape == y.shape and bool(equal_or_nan(x, y).all())


def _own_positions(row: torch.Tensor, alone: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Where in a padded row the row without padding lies; None if it is another row."""
    length, own = row.shape[dim], alone.shape[dim]
    firsts = sorted(range(length - own + 1), key=lambda at: at not in (0, length - own))
    first = next((at for at in firsts if same_numbers(row.narrow(dim, at, own), alone)), None)
    return None if first is None else (torch.arange(length) >= first) & (torch.arange(length) < first + own)


def _beside_constant(row: torch.Tensor, alone: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The same of a row with random numbers, that are others when it is collated alone: what is beside them is one
    number."""
    length, own = row.shape[dim], alone.shape[dim]
    positions = torch.arange(length)
    for own_t in (positions < own, positions >= length - own):
        padding = row.movedim(dim, 0)[~own_t]
        if bool((padding == padding.flatten()[0]).all()):
            return own_t
    return None


def padding_before(batch: Any) -> Padding | None:
    """The row with most padding, by the mask of the batch."""
    mask_bt = mask_of(batch)
    if mask_bt is None or bool(mask_bt.all()):
        return None
    lengths_b = mask_bt.sum(1)
    row = int(lengths_b.masked_fill(lengths_b == 0, mask_bt.shape[1]).argmin())
    return Padding(row, mask_bt[row], False, bool(mask_bt.all(1).any()))


def goes_on(batch: Any, name: str, padding: Padding) -> bool:
    """Return whether a column of a batch has more than one number where a row is padding."""
    x = dict(leaves(batch)).get(name)
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[1] != padding.length or len(x) <= padding.row:
        return False
    beside = x[padding.row][~padding.own_t.to(x.device)]
    return not same_numbers(beside, beside[-1:].expand_as(beside))


def traits_of(batch: Any, size: int) -> frozenset:
    """What kinds of masks and counts a batch has, for which rules may compute otherwise: the self-check runs for each
    that is new.

    Of every mask the sides on which it hides something; every column of whole numbers, one for each example, that
    varies.
    """
    traits = set()
    for name, x in leaves(batch):
        if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or not x.dim() or len(x) != size:
            continue
        if x.dim() == 1 and size > 1 and "label" not in name:
            traits |= {(name, "varies")} if bool((x != x[0]).any()) else set()
        elif "mask" in name and x.numel():
            traits |= {
                (name, side)
                for side, column in (("left", x[..., 0]), ("right", x[..., -1]))
                if bool((column == 0).any())
            }
    return frozenset(traits)
