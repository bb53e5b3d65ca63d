"""nn.RNN, nn.LSTM, nn.GRU and their cells, without a Python loop through autograd.

The forward pass is torch's own fused kernel. The rule has h at every step, so it recomputes all gates in one matrix
product, and from them the gradient of each pre-activation per unit of gradient of h (or of the LSTM's c). A recursion
over the steps, one small matrix product each, turns this into dz, the gradients of the pre-activations. Then the
weights are linear layers: W_ih in (x, dz) and W_hh in (h of the previous step, dz). dz also gives the gradients of the
inputs and initial states, so the module's own backward need not run.

Shape legend: n rows, b sequences, d in, h hidden, p out (h, unless an LSTM projects), k pre-activations of all gates,
l layers times directions. Rows are those of a PackedSequence: for each step, the sequences that have not ended, the
longest first; a padded batch is the case of equal lengths. Layers are processed from the last to the first; outputs
below the last are recomputed by torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.nn.utils.rnn import PackedSequence

from ...runtime.randomness import replayed
from ..errors import UnsupportedModuleError, how_to_fix
from ..layer_rule import layer_rule
from ..precision import HALF
from ..recorded_call import RecordedCall
from ..terms import Outer, Term, summed
from ..terms.tied_weights import merge

ROLES = ("ih", "hh", "bias_ih", "bias_hh", "projection")
INSTANCE_MEMORY = 2  # with hundreds of steps, instances halve the arithmetic

Weights = Mapping[str, torch.Tensor]  # by role
Parameters = Mapping[str, nn.Parameter]


class _Rows:
    """Maps rows to steps and sequences: ``sizes[t]`` sequences run at step t, and the j-th one is example
    ``order[j]``."""

    def __init__(self, batch_sizes: torch.Tensor, order: torch.Tensor | None = None):
        self.batch_sizes, self.order = batch_sizes, order
        self.sizes: list[int] = batch_sizes.tolist()
        self.batch = self.sizes[0]
        self.padded = order is None and self.sizes[-1] == self.batch

    def walk(self, *, reverse: bool) -> range:
        steps = range(len(self.sizes))
        return steps[::-1] if reverse else steps

    def _steps_and_sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        start_t = torch.tensor([0, *accumulate(self.sizes)])
        step_n = torch.arange(len(self.sizes)).repeat_interleave(self.batch_sizes)
        return step_n, torch.arange(len(step_n)) - start_t[step_n]

    def before(self, x_np: torch.Tensor, initial_bp: torch.Tensor, *, reverse: bool) -> torch.Tensor:
        """Return (N, p): for every row, its sequence's row of the previous step (``reverse``: the next), or the
        initial state."""
        if self.padded:
            return torch.cat(
                [x_np[self.batch :], initial_bp] if reverse else [initial_bp, x_np[: len(x_np) - self.batch]]
            )
        step_n, sequence_n = self._steps_and_sequences()
        neighbour_n = step_n + (2 if reverse else 0)  # counted from one step before the first
        size_t, start_t = F.pad(self.batch_sizes, (1, 1)), torch.tensor([0, 0, *accumulate(self.sizes)])
        index_n = torch.where(
            sequence_n < size_t[neighbour_n], self.batch + start_t[neighbour_n] + sequence_n, sequence_n
        )
        return torch.cat([initial_bp, x_np])[index_n.to(x_np.device)]

    def by_step(self, x_np: torch.Tensor) -> torch.Tensor:
        """Reshape rows of a padded batch to (T, B, p)."""
        return x_np.view(len(self.sizes), self.batch, x_np.shape[1])

    def by_example(self, x_np: torch.Tensor) -> torch.Tensor:
        """Return (B, T, p), zero after the end of a sequence."""
        if self.padded:
            return self.by_step(x_np).transpose(0, 1)
        step_n, sequence_n = (index_n.to(x_np.device) for index_n in self._steps_and_sequences())
        example_n = sequence_n if self.order is None else self.order[sequence_n]
        return x_np.new_zeros(self.batch, len(self.sizes), x_np.shape[1]).index_put_((example_n, step_n), x_np)

    def sorted(self, x_lbp: torch.Tensor) -> torch.Tensor:
        return x_lbp if self.order is None else x_lbp.index_select(1, self.order)

    def unsorted(self, x_lbp: torch.Tensor) -> torch.Tensor:
        return x_lbp if self.order is None else torch.empty_like(x_lbp).index_copy_(1, self.order, x_lbp)


# ---- one layer in one direction: __init__ recomputes the forward pass, `back` goes back over one step ----


class _RNN:
    """h = f(W_ih x + b_ih + W_hh h' + b_hh), where h' is h of the previous step."""

    def __init__(
        self,
        w: Weights,
        x_nd: torch.Tensor,
        h_nh: torch.Tensor,
        rows: _Rows,
        activation: Callable,
        recorded_nh: torch.Tensor,
    ):
        self.output = activation(_affine(w, x_nd, h_nh))
        one_nh = torch.ones_like(self.output)
        self.dz_ih = self.dz_hh = (
            _d_tanh(one_nh, self.output) if activation is torch.tanh else one_nh * (recorded_nh > 0)
        )
        self._w_hh, self._dz_t = w["hh"], self.dz_hh.split(rows.sizes)

    def back(self, t: int, dh_bh: torch.Tensor) -> None:
        """Turn the gradient of h at step ``t`` (of the sequences that run then) into that of h' in place, and store dz
        in ``dz_ih, dz_hh``."""
        torch.mm(self._dz_t[t].mul_(dh_bh), self._w_hh, out=dh_bh)


class _GRU:
    """h = n + z ∘ (h' - n); r, z, n = σ(x_r + h_r), σ(x_z + h_z), tanh(x_n + r ∘ h_n); x_* = W_ih x + b_ih, h_* = W_hh
    h' + b_hh."""

    def __init__(self, w: Weights, x_nd: torch.Tensor, h_nh: torch.Tensor, rows: _Rows):
        width = h_nh.shape[1]
        x_r, x_z, x_n = F.linear(x_nd, w["ih"], w.get("bias_ih")).split(width, 1)
        h_r, h_z, h_n = F.linear(h_nh, w["hh"], w.get("bias_hh")).split(width, 1)
        r, z = (x_r + h_r).sigmoid_(), (x_z + h_z).sigmoid_()
        n, self._dz_nk = torch.addcmul(x_n, r, h_n).tanh_(), x_nd.new_empty(len(x_nd), 4 * width)
        self.output = torch.lerp(n, h_nh, z)
        dx_n, d_r, d_z, dh_n = self._dz_nk.chunk(4, 1)  # gradients per unit of dh
        _d_tanh(1 - z, n, out=dx_n)
        _d_sigmoid(dx_n * h_n, r, out=d_r)
        _d_sigmoid(h_nh - n, z, out=d_z)
        torch.mul(dx_n, r, out=dh_n)
        self._w_hh, self._width = w["hh"], width
        self._z_t, self._dz_t = z.split(rows.sizes), self._dz_nk.split(rows.sizes)

    def back(self, t: int, dh_bh: torch.Tensor) -> None:
        dz_bk = self._dz_t[t]
        dz_bk.mul_(torch.cat([dh_bh] * 4, 1))
        dh_bh.mul_(self._z_t[t]).addmm_(dz_bk[:, self._width :], self._w_hh)

    @property
    def dz_ih(self) -> torch.Tensor:
        dz_n, dz_rz = self._dz_nk[:, : self._width], self._dz_nk[:, self._width : 3 * self._width]
        return torch.cat([dz_rz, dz_n], 1)

    @property
    def dz_hh(self) -> torch.Tensor:
        return self._dz_nk[:, self._width :]


class _LSTM:
    """c = f ∘ c' + i ∘ g, h = o ∘ tanh(c), times W_hr where it projects; i, f, o = σ, g = tanh of W_ih x + b_ih + W_hh
    h' + b_hh."""

    d_output: torch.Tensor  # gradients of the projected outputs
    _d_output_t: Sequence[torch.Tensor]

    def __init__(
        self,
        w: Weights,
        x_nd: torch.Tensor,
        h_np: torch.Tensor,
        rows: _Rows,
        c0_bh: torch.Tensor,
        dc_bh: torch.Tensor,
        reverse: bool,
    ):
        self.dc = dc_bh.clone()  # gradient of c at the step that `back` processes next
        z_nk = _affine(w, x_nd, h_np)
        z_i, z_f, z_g, z_o = z_nk.chunk(4, 1)
        i, f, g, o = z_i.sigmoid(), z_f.sigmoid(), z_g.tanh(), z_o.sigmoid()
        self._f_t, c_nh = f.split(rows.sizes), i * g
        c_t, last_bh = c_nh.split(rows.sizes), c0_bh.clone()
        for t in rows.walk(reverse=reverse):
            running_bh = last_bh[: rows.sizes[t]]
            running_bh.copy_(c_t[t].addcmul_(self._f_t[t], running_bh))
        tanh_c = c_nh.tanh()
        self.hidden = o * tanh_c
        self._projection = w.get("projection")
        self.output = self.hidden if self._projection is None else F.linear(self.hidden, self._projection)
        self._slope_c_t = torch.addcmul(o, self.hidden, tanh_c, value=-1).split(rows.sizes)  # of h in c
        _d_sigmoid(g, i, out=z_i)  # in z's memory: dz per unit of dc (three times), and per unit of dh
        _d_sigmoid(rows.before(c_nh, c0_bh, reverse=reverse), f, out=z_f)
        _d_tanh(i, g, out=z_g)
        _d_sigmoid(tanh_c, o, out=z_o)
        self.dz_ih = self.dz_hh = z_nk
        self._w_hh, self._dz_t = w["hh"], z_nk.split(rows.sizes)
        if self._projection is not None:
            self.d_output = torch.empty_like(self.output)
            self._d_output_t = self.d_output.split(rows.sizes)

    def back(self, t: int, dh_bp: torch.Tensor) -> None:
        dz_bk, dc_bh, dh_bh = self._dz_t[t], self.dc[: len(dh_bp)], dh_bp
        if self._projection is not None:
            dh_bh = self._d_output_t[t].copy_(dh_bp) @ self._projection
        dc_bh.addcmul_(dh_bh, self._slope_c_t[t])
        dz_bk.mul_(torch.cat([dc_bh, dc_bh, dc_bh, dh_bh], 1))
        dc_bh.mul_(self._f_t[t])
        torch.mm(dz_bk, self._w_hh, out=dh_bp)


def _affine(w: Weights, x_nd: torch.Tensor, h_np: torch.Tensor) -> torch.Tensor:
    bias = w["bias_ih"] + w["bias_hh"] if "bias_ih" in w else None
    return F.linear(x_nd, w["ih"], bias).addmm_(h_np, w["hh"].t())


def _d_sigmoid(g: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return g · σ' for σ = y."""
    return torch.ops.aten.sigmoid_backward.grad_input(g, y, grad_input=torch.empty_like(y) if out is None else out)


def _d_tanh(g: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return g · tanh' for tanh = y."""
    return torch.ops.aten.tanh_backward.grad_input(g, y, grad_input=torch.empty_like(y) if out is None else out)


_Direction = _RNN | _GRU | _LSTM


def _go_back(
    direction: _Direction, d_output_np: torch.Tensor, d_final_bp: torch.Tensor, rows: _Rows, *, reverse: bool
) -> torch.Tensor:
    """Run the recursion over all steps, and return the gradient of the initial h."""
    dh_bp, d_output_t = d_final_bp.clone(), d_output_np.split(rows.sizes)
    for t in rows.walk(reverse=not reverse):
        running_bp = dh_bp[: rows.sizes[t]].add_(d_output_t[t])
        direction.back(t, running_bp)
    return dh_bp


# ---- all layers ----


@dataclass
class _Stack:
    """A call of all layers. ``layers[l][d]`` are the parameters of layer l in direction d, by role; states are h and,
    for an LSTM, c."""

    mode: str
    layers: list[list[Parameters]]
    dropout: float
    rows: _Rows
    x_nd: torch.Tensor
    initial_lbp: list[torch.Tensor]
    output_np: torch.Tensor
    d_output_np: torch.Tensor
    d_final_lbp: list[torch.Tensor]

    def direction(
        self, k: int, w: Weights, x_nd: torch.Tensor, h_np: torch.Tensor, output_np: torch.Tensor, *, reverse: bool
    ) -> _Direction:
        if self.mode == "LSTM":
            return _LSTM(w, x_nd, h_np, self.rows, self.initial_lbp[1][k], self.d_final_lbp[1][k], reverse)
        if self.mode == "GRU":
            return _GRU(w, x_nd, h_np, self.rows)
        return _RNN(w, x_nd, h_np, self.rows, torch.tanh if self.mode == "RNN_TANH" else torch.relu, output_np)

    def run_layer(self, layer: int, x_nd: torch.Tensor) -> torch.Tensor:
        """Return the output rows of one layer, computed by torch's kernel."""
        kernel, directions = getattr(_VF, self.mode.lower()), self.layers[layer]
        states = [x[layer * len(directions) : (layer + 1) * len(directions)].contiguous() for x in self.initial_lbp]
        hx = states if self.mode == "LSTM" else states[0]
        weights = [w[role].detach() for w in directions for role in ROLES if role in w]
        options = (weights, "bias_ih" in directions[0], 1, 0.0, False, len(directions) == 2)
        if self.rows.padded:
            return kernel(self.rows.by_step(x_nd), hx, *options, False)[0].flatten(0, 1)
        return kernel(x_nd, self.rows.batch_sizes, hx, *options)[0]


def _run_below(call: RecordedCall, stack: _Stack) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return every layer's input and output, and the dropout (as factors) between them."""
    inputs, outputs, dropout = [stack.x_nd], [], []
    below = range(len(stack.layers) - 1)
    if below and 0 < stack.dropout < 1 and stack.x_nd.numel() and call.random_state is None:
        raise _unsupported(
            call,
            "its dropout cannot be replayed on this device. Set its dropout to 0, and use nn.Dropout between layers",
        )
    dtype = stack.output_np.dtype
    with (
        torch.autocast(stack.x_nd.device.type, dtype=dtype if dtype in HALF else None, enabled=dtype in HALF),
        replayed(call.random_state),
    ):
        for layer in below:
            outputs.append(stack.run_layer(layer, inputs[-1]))
            dropout.append(F.dropout(torch.ones_like(outputs[-1]), stack.dropout))
            inputs.append(outputs[-1] * dropout[-1])
    return inputs, [*outputs, stack.output_np], dropout


def _differentiate(
    call: RecordedCall, stack: _Stack, *, needs_input: bool
) -> tuple[dict[nn.Parameter, Term], torch.Tensor | None, list[torch.Tensor]]:
    """Return the terms, the gradient of the input rows (None unless needed), and those of the initial states."""
    rows, dtype = stack.rows, stack.d_output_np.dtype
    inputs, outputs, dropout = _run_below(call, stack)
    terms: dict[nn.Parameter, Term] = {}
    d_x: torch.Tensor | None = None
    d_output_np, d_initial_lbp = stack.d_output_np, [torch.empty_like(x) for x in stack.initial_lbp]
    for layer in reversed(range(len(stack.layers))):
        directions, x_nd, d_x = stack.layers[layer], inputs[layer].to(dtype), None
        parts = zip(
            outputs[layer].to(dtype).chunk(len(directions), 1), d_output_np.chunk(len(directions), 1), strict=True
        )
        for d, (output_np, d_part_np) in enumerate(parts):
            k, reverse, parameters = layer * len(directions) + d, d == 1, directions[d]
            w = {role: p.detach().to(dtype) for role, p in parameters.items()}
            h_np = rows.before(output_np, stack.initial_lbp[0][k], reverse=reverse)
            direction = stack.direction(k, w, x_nd, h_np, output_np, reverse=reverse)
            _require_same(call, output_np, direction.output)
            d_initial_lbp[0][k] = _go_back(direction, d_part_np, stack.d_final_lbp[0][k], rows, reverse=reverse)
            if isinstance(direction, _LSTM):
                d_initial_lbp[1][k] = direction.dc
            _add_terms(terms, parameters, direction, x_nd, h_np, rows)
            if layer or needs_input:
                d_part_nd = direction.dz_ih @ w["ih"]
                d_x = d_part_nd if d_x is None else d_x + d_part_nd
        if layer and d_x is not None:
            d_output_np = d_x * dropout[layer - 1]
    return terms, d_x, d_initial_lbp


def _add_terms(
    terms: dict[nn.Parameter, Term],
    parameters: Parameters,
    direction: _Direction,
    x_nd: torch.Tensor,
    h_np: torch.Tensor,
    rows: _Rows,
) -> None:
    dz_ih = rows.by_example(direction.dz_ih)
    dz_hh = dz_ih if direction.dz_hh is direction.dz_ih else rows.by_example(direction.dz_hh)
    for role, p in parameters.items():
        if not p.requires_grad:
            continue
        if role == "ih":
            term = Outer(dz_ih, rows.by_example(x_nd), INSTANCE_MEMORY)
        elif role == "hh":
            term = Outer(dz_hh, rows.by_example(h_np), INSTANCE_MEMORY)
        elif role == "projection":
            lstm = cast(_LSTM, direction)  # only an LSTM projects
            term = Outer(rows.by_example(lstm.d_output), rows.by_example(lstm.hidden), INSTANCE_MEMORY)
        else:
            term = summed(dz_ih if role == "bias_ih" else dz_hh, (1,))
        terms[p] = merge([terms[p], term])[0] if p in terms else term  # layers that share a parameter


def _require_same(call: RecordedCall, recorded_np: torch.Tensor, recomputed_np: torch.Tensor) -> None:
    """Raise UnsupportedModuleError unless each step, recomputed from the previous recorded one, equals the recorded
    one, up to rounding, in the entries that are finite."""
    tolerance = 3e-2 if call.outputs[0].dtype in HALF else 1e-4
    difference_np = recorded_np - recomputed_np
    if difference_np.norm() <= tolerance * recorded_np.norm():
        return
    finite = torch.isfinite(recorded_np)
    if not torch.where(finite, difference_np, 0).norm() <= tolerance * torch.where(finite, recorded_np, 0).norm():
        raise _unsupported(
            call,
            "computing it again from its weights gives another output, so its forward method is not torch's, or its "
            "weights were changed since",
        )


def _unsupported(call: RecordedCall, reason: str) -> UnsupportedModuleError:
    where = f"the gradients per example of {call.owner} cannot be had from this call"
    return UnsupportedModuleError(f"{where}: {reason}. {how_to_fix(call.module)}", call.module)


def _states(hx: torch.Tensor | Sequence[torch.Tensor] | None, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the initial states, which are zeros of the shape of ``outputs`` by default."""
    if hx is None:
        return [torch.zeros_like(y) for y in outputs]
    return [hx] if isinstance(hx, torch.Tensor) else list(hx)


# ---- the modules ----


def _by_role(call: RecordedCall, weights: Sequence[torch.Tensor | None]) -> Parameters:
    roles = ROLES if len(weights) > 3 else ("ih", "hh", "projection")  # without biases
    found = {role: p for role, p in zip(roles, weights, strict=False) if p is not None}
    parameters = {role: p for role, p in found.items() if isinstance(p, nn.Parameter)}
    if len(parameters) < len(found):
        raise _unsupported(call, "its weights are computed from others (a parametrization, as weight_norm is)")
    return parameters


def _give(call: RecordedCall, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    if tensor in call.input_gradients:
        call.input_gradients[tensor] = gradient.to(tensor.dtype)


def _dropout(module: nn.RNNBase) -> float:
    return module.dropout if module.training else 0.0


def _settings(module: nn.RNNBase) -> dict[str, object]:
    names = ("mode", "num_layers", "bidirectional", "batch_first", "proj_size")
    return {name: getattr(module, name) for name in names} | {"dropout": _dropout(module)}


@layer_rule(nn.RNN, nn.LSTM, nn.GRU, takes_call=True, reads=_settings)
def recurrent(call: RecordedCall) -> dict[nn.Parameter, Term]:
    module, arguments = cast(nn.RNNBase, call.module), call.arguments
    x, hx = arguments["input"], arguments["hx"]
    packed, batch_first = isinstance(x, PackedSequence), module.batch_first
    data = x.data if packed else x
    if not packed and x.dim() != 3:
        raise UnsupportedModuleError(
            f"{call.owner} was called on one sequence without a batch dimension, so "
            "gradients per example cannot be told apart: call it with three dimensions, the batch among them.",
            module,
        )
    if packed:
        rows = _Rows(x.batch_sizes, x.sorted_indices)
    else:
        steps, batch = x.shape[:2][:: -1 if batch_first else 1]
        rows = _Rows(torch.full((steps,), batch))
    if rows.batch != call.batch_size:
        reason = f"it was called on {rows.batch} sequences in a batch of {call.batch_size} examples"
        if not packed and x.shape[1 if batch_first else 0] == call.batch_size:
            way_out = f"if these are the examples, build it with batch_first={not batch_first}"
            reason += f", and {call.batch_size} is its number of time steps: {way_out}"
        raise _unsupported(call, reason)

    def as_rows(y: torch.Tensor) -> torch.Tensor:
        return y if packed else (y.transpose(0, 1) if batch_first else y).flatten(0, 1)

    per_layer = 2 if module.bidirectional else 1
    weights = [_by_role(call, w) for w in module.all_weights]
    layers = [weights[k : k + per_layer] for k in range(0, len(weights), per_layer)]
    dtype = torch.promote_types(torch.float32, weights[0]["hh"].dtype)
    states = _states(hx, call.outputs[1:])
    stack = _Stack(
        module.mode,
        layers,
        _dropout(module),
        rows,
        as_rows(data),
        [rows.sorted(y).to(dtype) for y in states],
        as_rows(call.outputs[0]),
        as_rows(call.backprops[0]).to(dtype),
        [rows.sorted(g).to(dtype) for g in call.backprops[1:]],
    )
    terms, d_rows, d_initial = _differentiate(call, stack, needs_input=data in call.input_gradients)
    if d_rows is not None:
        _give(call, data, d_rows if packed else rows.by_example(d_rows) if batch_first else rows.by_step(d_rows))
    for state, gradient in zip(states, d_initial, strict=True):
        _give(call, state, rows.unsorted(gradient))
    return terms


def _mode_of_cell(cell: nn.RNNCellBase) -> str:
    if isinstance(cell, nn.RNNCell):
        return f"RNN_{cell.nonlinearity.upper()}"
    return "LSTM" if isinstance(cell, nn.LSTMCell) else "GRU"


@layer_rule(nn.RNNCell, nn.LSTMCell, nn.GRUCell, takes_call=True, reads=lambda cell: {"mode": _mode_of_cell(cell)})
def recurrent_cell(call: RecordedCall) -> dict[nn.Parameter, Term]:
    """Return the terms of one step of one layer."""
    module, arguments = cast(nn.RNNCellBase, call.module), call.arguments
    x, hx = arguments["input"], arguments["hx"]
    if x.dim() != 2 or len(x) != call.batch_size:
        reason = (
            f"its input has the shape {tuple(x.shape)} in a batch of {call.batch_size} examples, where the cell takes "
            f"({call.batch_size}, {module.input_size})"
        )
        raise _unsupported(call, reason)
    weights = _by_role(call, [module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh])
    dtype = torch.promote_types(torch.float32, weights["hh"].dtype)
    states = _states(hx, call.outputs)
    d_h, *d_c = (g.to(dtype) for g in call.backprops)
    stack = _Stack(
        _mode_of_cell(module),
        [[weights]],
        0.0,
        _Rows(torch.tensor([len(x)])),
        x,
        [y.to(dtype)[None] for y in states],
        call.outputs[0],
        d_h,
        [torch.zeros_like(d_h)[None], *(g[None] for g in d_c)],
    )
    terms, d_x, d_initial = _differentiate(call, stack, needs_input=x in call.input_gradients)
    if d_x is not None:
        _give(call, x, d_x)
    for state, gradient in zip(states, d_initial, strict=True):
        _give(call, state, gradient[0])
    return terms
