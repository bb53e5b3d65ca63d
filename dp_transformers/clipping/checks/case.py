"""What one comparison of the checks runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..engine import ClippingEngine
from .float32 import with_float32
from .synthetic import LossFunction, has_batch, only_rows, replace_example


@dataclass(frozen=True)
class Case:
    """A model with its clipper, and the losses of one batch.

    Attributes:
        engine: The clipper's.
        losses_of: ``f(*args, **kwargs) -> (B,)``.
        args: Positional arguments of the model's forward; tensors with the examples first.
        kwargs: Keyword arguments, likewise.
        batch: B, how many examples they hold.
        draw: ``f(rows)``, arguments like these of so many other examples; None where there are no others.
    """

    engine: ClippingEngine
    losses_of: LossFunction
    args: tuple
    kwargs: dict
    batch: int
    draw: Callable[[int], tuple[tuple, dict]] | None = None

    def losses(self) -> torch.Tensor:
        """(B,)."""
        self.engine.state.restore()
        return self.losses_of(*self.args, **self.kwargs)

    def on(self, inputs: tuple[tuple, dict], batch: int | None = None) -> Case:
        """The same with these arguments, of ``batch`` examples (default: as many as before)."""
        args, kwargs = inputs
        return replace(self, args=args, kwargs=kwargs, batch=self.batch if batch is None else batch)

    def only(self, rows: list[int]) -> Case:
        """The same with these examples alone."""
        return self.on(only_rows(rows, self.args, self.kwargs, self.batch), len(rows))

    def with_copy(self, row: int, source: int) -> Case:
        """The same with a copy of example ``source`` in the place of ``row``."""
        return self.on(replace_example(self.args, self.kwargs, self.batch, row, source))

    def others(self, rows: int) -> Case:
        """The same with so many other examples; where there are none with these again, the first in another place."""
        if self.draw is not None:
            return self.on(self.draw(rows), rows)

        def again(x: Any) -> Any:
            order = torch.arange(1, rows + 1)
            return x[order.to(x.device) % self.batch] if has_batch(x, self.batch) else x

        return self.on(tree_map(again, (self.args, self.kwargs)), rows)

    def in_float32(self) -> Case:
        """The same with every number of lower precision in float32."""
        draw = self.draw
        case = self.on(with_float32((self.args, self.kwargs)))
        return replace(case, draw=None if draw is None else lambda rows: with_float32(draw(rows)))
