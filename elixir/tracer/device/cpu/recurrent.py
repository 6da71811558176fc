"""Recurrent layers as the CPU runs them: LSTM in oneDNN, the others step by step over inputs that are projected at
once.

On meta PyTorch composes them as for a device that it does not know. Source: `RNN.cpp`, `mkldnn/RNN.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from elixir.torch_private import onednn_is_enabled, onednn_takes_bfloat16

aten = torch.ops.aten

_LSTM = 2
"""`ideep::rnn_kind::LSTM`."""

Cell = Callable[[torch.Tensor, Any, list[torch.Tensor]], Any]


def kernels() -> dict[str, Callable[..., Any]]:
    """Name in `aten` -> what the CPU does for it."""
    return {
        "lstm.input": _lstm,
        "gru.input": _single_state(_gru_cell),
        "rnn_tanh.input": _single_state(_simple_cell(torch.tanh)),
        "rnn_relu.input": _single_state(_simple_cell(torch.relu)),
    }


def _lstm(  # noqa: PLR0913 - the operator's own arguments
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    directions = 2 if bidirectional else 1
    weights = _per_layer(params, num_layers * directions)
    hidden, cell = hx
    projects = hidden.shape[2] != cell.shape[2]
    if projects or not input.numel() or not _onednn_takes(input.dtype):
        states = list(zip(hidden.unbind(0), cell.unbind(0), strict=True))
        output, last = _layers(input, states, weights, _lstm_cell, dropout, train, bidirectional, batch_first)
        return output, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])
    layer_input = (input.transpose(0, 1) if batch_first else input).contiguous()
    hidden, cell = hidden.contiguous(), cell.contiguous()
    hys: list[torch.Tensor] = []
    cys: list[torch.Tensor] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index] if has_biases else [*weights[index], *map(torch.zeros_like, weights[index])]
            output, hy, cy, _ = aten.mkldnn_rnn_layer(
                layer_input, *own, hidden[index], cell[index], direction > 0, [], _LSTM, hidden.shape[2], num_layers,
                has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            hys.append(hy)
            cys.append(cy)
        layer_input = torch.cat(outputs, -1) if bidirectional else outputs[0]
        del outputs, output
        if layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, train)
    result = layer_input.transpose(0, 1) if batch_first else layer_input
    return result, torch.stack(hys), torch.stack(cys)


def _onednn_takes(dtype: torch.dtype) -> bool:
    return onednn_is_enabled() and (dtype is torch.float32 or (dtype is torch.bfloat16 and onednn_takes_bfloat16()))


def _single_state(cell: Cell) -> Callable[..., Any]:
    def run(  # noqa: PLR0913 - the operator's own arguments
        input: torch.Tensor,
        hx: torch.Tensor,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = _per_layer(params, num_layers * (2 if bidirectional else 1))
        states = list(hx.unbind(0))
        output, last = _layers(input, states, weights, cell, dropout, train, bidirectional, batch_first)
        return output, torch.stack(last)

    return run


def _per_layer(params: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    each = len(params) // count
    return [list(params[begin:end]) for begin, end in pairwise(range(0, len(params) + 1, each))]


def _layers(
    input: torch.Tensor,
    states: list[Any],
    weights: list[list[torch.Tensor]],
    cell: Cell,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, list[Any]]:
    """`apply_layer_stack` over `FullLayer` or `FullBidirectionalLayer`."""
    layer_input = input.transpose(0, 1) if batch_first else input
    last = []
    step = 2 if bidirectional else 1
    for index in range(0, len(states), step):
        output, state = _full_layer(layer_input, states[index], weights[index], cell, backwards=False)
        last.append(state)
        if bidirectional:
            other, state = _full_layer(layer_input, states[index + 1], weights[index + 1], cell, backwards=True)
            last.append(state)
            output = torch.cat([output, other], output.dim() - 1)
            del other
        layer_input = output
        del output
        if index + step < len(states):
            layer_input = torch.dropout(layer_input, dropout, train)
    return (layer_input.transpose(0, 1) if batch_first else layer_input), last


def _full_layer(
    inputs: torch.Tensor, state: Any, weights: list[torch.Tensor], cell: Cell, *, backwards: bool
) -> tuple[torch.Tensor, Any]:
    bias = weights[2] if len(weights) > 3 else None
    projected = list(F.linear(inputs, weights[0], bias).unbind(0))
    outputs = []
    for item in reversed(projected) if backwards else projected:
        state = cell(item, state, weights)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _from_state(state: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return F.linear(state, weights[1], weights[3] if len(weights) > 3 else None)


def _simple_cell(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Cell:
    return lambda item, state, weights: nonlinearity(_from_state(state, weights).add_(item))


def _gru_cell(item: torch.Tensor, state: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    of_input = item.unsafe_chunk(3, 1)
    of_state = _from_state(state, weights).unsafe_chunk(3, 1)
    reset = of_state[0].add_(of_input[0]).sigmoid_()
    gate = of_state[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_state[2].mul_(reset)).tanh_()
    return (state - new).mul_(gate).add_(new)


def _lstm_cell(
    item: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, cell = state
    gates = _from_state(hidden, weights).add_(item).unsafe_chunk(4, 1)
    taken, kept, new, shown = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_(), gates[3].sigmoid_()
    after = (kept * cell).add_(taken * new)
    output = shown * after.tanh()
    projection = weights[-1] if len(weights) in (3, 5) else None
    return (output if projection is None else output @ projection.t()), after
