"""A device that is not the CPU, simulated on the CPU: what a GPU refuses or waits for can be seen without one.

Its tensors say ``device(type="simulated")``, and what they hold lies in the memory of the CPU, found by their storage. As on a
GPU, tensors of two devices cannot be combined, backward passes run in a thread of their own, and no tensor is read
without a copy. Every operation that a GPU would make the program wait for is counted (:class:`Synchronisations`).

Importing this module registers the device with torch for the rest of the process, which torch then takes for its
accelerator. Tests therefore do that in processes of their own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "simulated"
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)  # makes views without a look at the memory
_memory: dict[int, torch.UntypedStorage] = {}  # where the content of a storage of the device lies

# Operations that return a number, or a tensor whose size depends on what another one holds. CUDA waits for them.
_WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim", "_unique", "is_nonzero", "nonzero_numpy",
}  # fmt: skip

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
# Products of bf16 factors in float32, which torch has on CUDA alone.
_OUT_DTYPES = {"aten.mm.dtype": torch.ops.aten.mm.default, "aten.bmm.dtype": torch.ops.aten.bmm.default}


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of ``torch.simulated``. The device has a generator of its own."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(0).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.state = state.clone()

    def manual_seed_all(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed + 1).get_state()  # another stream than the CPU's

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the CPU draws what the device would."""
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """What is free, and all; these numbers are made up."""
        return 8 * 10**9, 16 * 10**9

    def memory_reserved(self, device: Any = None) -> int:
        return 3 * 10**9

    def max_memory_allocated(self, device: Any = None) -> int:
        return 2 * 10**9

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return 1.0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Synchronisations:
    """Counts inside of a ``with`` block what a GPU would make the program wait for.

    Attributes:
        found: How often each was met, by what it is and the function that asked for it.
    """

    _counting: Synchronisations | None = None

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __enter__(self) -> Synchronisations:
        type(self)._counting = self
        return self

    def __exit__(self, *exc: object) -> None:
        type(self)._counting = None

    @classmethod
    def meet(cls, what: str) -> None:
        if cls._counting is not None:
            cls._counting.found[f"{_caller()}: {what}"] += 1


def _caller() -> str:
    """The innermost function that is running and neither this module's nor torch's."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in (__name__, "torch") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


def _is_there(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _content(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU that shares its memory with one of the device."""
    memory = _memory[t.untyped_storage()._cdata]
    return torch.empty(0, dtype=t.dtype).set_(memory, t.storage_offset(), t.size(), t.stride())


def _waits(name: str, args: tuple) -> bool:
    if name == "_index_put_impl_":  # of one number it fills a mask
        return args[2].numel() > 1 and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name in _WAITING or (name == "repeat_interleave" and len(args) == 1)


def _in_tf32(x: torch.Tensor) -> torch.Tensor:
    """As hardware reads the factors of products in TF32: ten bits behind the point."""
    return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def _rounded(name: str, x: Any) -> Any:
    """A factor of a product, in the precision that torch is told to multiply in."""
    setting = torch.backends.mkldnn.conv if "convolution" in name else torch.backends.mkldnn.matmul
    is_factor = isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.dim() > 1
    return _in_tf32(x) if is_factor and setting.fp32_precision == "tf32" else x


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of the device on the CPU."""
    name = op._schema.name.removeprefix("aten::")
    flat, spec = tree_flatten((args, kwargs))
    given = [x for x in flat if _is_there(x)]
    if given:
        _refuse_mixture(op, flat)
    if _waits(name, args):
        Synchronisations.meet(name)
    contents = [_content(x) for x in given]
    of_content = {id(c): x for c, x in zip(contents, given, strict=True)}
    of_memory = {c.untyped_storage()._cdata: x for c, x in zip(contents, given, strict=True)}
    rest = iter(contents)
    on_cpu = [next(rest) if _is_there(x) else torch.device("cpu") if isinstance(x, torch.device) else x for x in flat]
    a, k = tree_unflatten(on_cpu, spec)
    a = [_as_declared(x, argument) for x, argument in zip(a, op._schema.arguments, strict=False)]

    def there(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in of_content:  # written in place
            return of_content[id(result)]
        owner = of_memory.get(result.untyped_storage()._cdata)
        return _new(result) if owner is None or owner.dtype != result.dtype else _view(owner, result)

    if name in _PRODUCTS:
        a = [_rounded(name, x) for x in a]
    if out_dtype := _OUT_DTYPES.get(str(op)):
        op, (*a, dtype) = out_dtype, a
        a = [x.to(dtype) for x in a]
    draws = torch.Tag.nondeterministic_seeded in op.tags and not isinstance(k.get("generator"), torch.Generator)
    with _module.drawing() if draws else nullcontext():
        results = op(*a, **k)
    for x, content in zip(given, contents, strict=True):
        if x.size() != content.size():  # one that was made empty for the result
            x.data = _new(content)
    return tree_map(there, results)


def _new(content: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with this content."""
    t = torch._C._acc.create_empty_tensor(content.size(), content.dtype)
    _memory[t.untyped_storage()._cdata] = content.untyped_storage()
    return _view(t, content)


def _view(owner: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in the memory of another as ``content`` does."""
    as_strided = torch.ops.aten.as_strided.default
    return as_strided.redispatch(_META, owner, content.size(), content.stride(), content.storage_offset())


def _as_declared(x: Any, argument: Any) -> Any:
    """A number comes as such, where an operation takes a tensor."""
    if isinstance(x, (int, float)) and isinstance(argument.type, torch.TensorType):
        return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    return x


def _refuse_mixture(op: torch._ops.OpOverload, flat: list[Any]) -> None:
    """As CUDA does, which takes numbers from the CPU, and indices."""
    for x in flat:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dim():
            if op._schema.name.startswith("aten::index") and not x.is_floating_point():
                Synchronisations.meet("copy to the device")
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"({op})"
            )


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not _is_there(target):
        Synchronisations.meet("copy to the CPU")
    elif not _is_there(source):
        Synchronisations.meet("copy to the device")
    contents = [_content(x) if _is_there(x) else x for x in (source, target)]
    contents[1].copy_(contents[0])
    return target


def _convolution(*args: Any) -> torch.Tensor:
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any) -> Any:
    biases = [grad.shape[1]]
    return _run(torch.ops.aten.convolution_backward.default, grad, x, weight, biases, *how)


def _lstm_cell(x: Any, h: Any, c: torch.Tensor, b_x: Any = None, b_h: Any = None) -> tuple[torch.Tensor, ...]:
    gates = (x if b_x is None else x + b_x) + (h if b_h is None else h + b_h)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, gates


def _gru_cell(x: Any, h: Any, state: torch.Tensor, b_x: Any = None, b_h: Any = None) -> tuple[torch.Tensor, ...]:
    x, h = x if b_x is None else x + b_x, h if b_h is None else h + b_h
    (r_x, z_x, n_x), (r_h, z_h, n_h) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = (z_x + z_h).sigmoid(), (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return n + z * (state - n), x


class _Generator(torch.Generator):
    """A generator of the device draws on the CPU, where torch knows no other."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(cls, torch.device("cpu") if torch.device(device).type == NAME else device)


_module = _Module()
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module)
_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
_operations = torch.library.Library("aten", "IMPL")
_operations.impl("_copy_from", _copy, "PrivateUse1")
_operations.impl("convolution_overrideable", _convolution, "PrivateUse1")
_operations.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
_operations.impl("_thnn_fused_lstm_cell", _lstm_cell, "AutogradPrivateUse1")
_operations.impl("_thnn_fused_gru_cell", _gru_cell, "AutogradPrivateUse1")
torch.Generator = _Generator
