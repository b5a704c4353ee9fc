"""Recurrent layers with torch.nn's parameters: stacked, in one or both directions, for any lengths.

    output, state = layer(x, state=None, lengths=None)

x is (B, T, D), the batch first by default, unlike torch.nn; `batch_first=False` makes it (T, B, D). `lengths`
(B,) says how much of each row is its sequence: what stands behind it has no effect, outputs there are zero,
and the state that comes back is that after the sequence's own last step. A length of 0 gives the state that
came in. States are torch.nn's: h (L·R, B, H), and (h, c) for the LSTM. A state that came back can be handed
in again, so that a long sequence may come in parts; `quire.functional.recurrent.detach_state` ends the
gradient between them.

Weights have torch.nn's names and shapes, and load_state_dict takes them over in both directions. They start
otherwise: each gate's recurrent block is orthogonal, input weights are Xavier's, biases zero, and the bias of
the LSTM's forget gate 1, so that a fresh cell remembers (R. Jozefowicz et al., 2015).

PyTorch's fused kernels do the work, in the weights' own type under autocast; on a CPU, where it has one for
the LSTM alone, `quire.functional.through_time` trains the others. A plain loop over time stands in where
neither can: for a GRU that resets before its matrix product, under torch.func, and for sequences of several
lengths in an exported program, where sorting by length would make the program depend on the data.

B sequences, T steps, D inputs, H hidden units, G gates, L layers, R directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as not_compiled  # torch.compiler.disable takes a second to import
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quire.errors import InputError, unknown_name
from quire.functional.initialise import xavier_
from quire.functional.recurrent import (
    Keeps,
    Reset,
    check_convention,
    check_lengths,
    elman_step,
    gru_step,
    lstm_step,
    orthogonal_gates_,
    unroll,
    valid_steps,
)
from quire.functional.regularise import check_rate
from quire.functional.through_time import can_run, elman_through_time, gru_through_time, transformed

State = Tensor | tuple[Tensor, Tensor]
"""h (L·R, B, H), or (h, c) for the LSTM."""
Parts = tuple[Tensor, ...]
"""The same, as a tuple of one or two."""

LEAST_STEPS = 16
"""Quire's own function of a sequence takes longer to begin than PyTorch's, which is as fast without
gradients: it wins in training, from here on."""

# cuDNN wants the weights in one chunk and copies them otherwise, as it must where training lays parameters
# flat for its own ends. That costs little, and its advice to call flatten_parameters would undo the layout.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


class Recurrent(nn.Module):
    """What the three layers share. A layer says its number of gates, its kernel and its step."""

    gates: ClassVar[int]
    parts: ClassVar[int] = 1
    """Tensors in a state."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        """`dropout` is the rate between layers, while training."""
        super().__init__()
        for name, size in (
            ("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)
        ):  # fmt: skip
            if size < 1:
                raise InputError(f"{name} is {size}", expected="at least 1", fix=f"set {name} to 1 or more")
        check_rate(dropout, "drop rate")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = (
            bias,
            batch_first,
            dropout,
            bidirectional,
        )
        self.directions = 2 if bidirectional else 1
        rows = self.gates * hidden_size
        for layer in range(num_layers):
            columns = input_size if layer == 0 else self.output_size
            shapes = [(rows, columns), (rows, hidden_size), *([(rows,), (rows,)] if bias else [])]
            for direction in range(self.directions):
                for name, shape in zip(self._names(layer, direction), shapes, strict=True):
                    self.register_parameter(name, nn.Parameter(torch.empty(*shape)))
        self.reset_parameters()

    @property
    def output_size(self) -> int:
        """R·H, the width of the outputs."""
        return self.directions * self.hidden_size

    def _names(self, layer: int, direction: int) -> list[str]:
        ending = f"l{layer}{'_reverse' if direction else ''}"
        kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        return [f"{kind}_{ending}" for kind in kinds]

    def weights_of(self, layer: int, direction: int) -> list[Tensor]:
        """weight_ih, weight_hh, and bias_ih, bias_hh where there are biases."""
        # Looked up each time, so that a parametrised weight (LoRA, weight norm) takes part.
        return [getattr(self, name) for name in self._names(layer, direction)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                weight_ih, weight_hh, *biases = self.weights_of(layer, direction)
                for block in weight_ih.chunk(self.gates):
                    xavier_(block)
                orthogonal_gates_(weight_hh)
                for bias in biases:
                    bias.zero_()

    # What a kind of layer adds ----------------------------------------------------------------

    def _kernel(self) -> Callable[..., Any] | None:
        """PyTorch's fused function, or None where it has none."""
        raise NotImplementedError

    def _kernel_weights(self, weights: list[Tensor]) -> list[Tensor]:
        """One layer's and direction's weights as the kernel wants them."""
        return weights

    def _step(self, weight_hh: Tensor, bias_hh: Tensor | None) -> Callable[..., Any]:
        """(a, state) → state for a = W_ih x + b_ih."""
        raise NotImplementedError

    def _sequence(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Quire's own function of a whole sequence on a CPU, or None."""
        return None

    # Forward ----------------------------------------------------------------------------------

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State]:
        self._check_inputs(x)
        x = x if self.batch_first else x.transpose(0, 1)
        states = self._start(x, state)
        if x.shape[1] == 0:
            output, last = x.new_zeros(x.shape[0], 0, self.output_size), states
        elif (
            self._kernel() is None or (lengths is not None and torch.compiler.is_exporting()) or transformed()
        ):
            output, last = self._loop(x, states, lengths)
        elif lengths is None:
            output, last = self._call(x, states)
        else:
            output, last = self._packed(x, states, lengths)
        return output if self.batch_first else output.transpose(0, 1), _alone(last)

    @not_compiled  # the compiler would unroll the fused kernel into T steps of its own
    def _call(
        self, data: Tensor, states: Parts, sizes: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        """The kernel over rows of one length, over packed `data` with the batch's `sizes` step by step, or
        over rows whose `lengths` fall."""
        device = data.device.type
        if torch.is_autocast_enabled(device):
            # cuDNN would take float16 whatever type is asked for, in which small gradients vanish.
            kind = self.weights_of(0, 0)[0].dtype
            with torch.autocast(device, enabled=False):
                return self._call(data.to(kind), tuple(part.to(kind) for part in states), sizes, lengths)
        if sizes is None and self._runs_itself(data):
            return self._itself(data, states, lengths)
        kernel = self._kernel()
        assert kernel is not None
        weights: list[Tensor] = []
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                weights += self._kernel_weights(self.weights_of(layer, direction))
        options = (weights, self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
        if sizes is None:
            found = kernel(data, _alone(states), *options, True)
        else:
            found = kernel(data, sizes, _alone(states), *options)
        return found[0], tuple(found[1:])

    @not_compiled
    def _packed(self, x: Tensor, states: Parts, lengths: Tensor) -> tuple[Tensor, Parts]:
        check_lengths(lengths, x)
        counts = lengths.cpu()  # where PyTorch wants them
        _check_range(counts, x.shape[1])
        if bool((counts == x.shape[1]).all()):
            return self._call(x, states)
        if self._runs_itself(x):
            fall = counts.argsort(descending=True, stable=True)
            again = fall.argsort()
            rows = x.masked_fill(~valid_steps(lengths, x).unsqueeze(-1), 0).index_select(0, fall)
            starts = tuple(part.index_select(1, fall) for part in states)
            output, last = self._call(rows, starts, lengths=counts[fall])
            return output.index_select(0, again), tuple(part.index_select(1, again) for part in last)
        # PyTorch refuses empty sequences: they get one step of zeros, whose results are thrown away.
        some_empty, empty = not bool(counts.all()), (lengths == 0).to(x.device)
        if some_empty:
            x = x.masked_fill(empty[:, None, None], 0)
        packed = pack_padded_sequence(x, counts.clamp(min=1), batch_first=True, enforce_sorted=False)
        sizes, order, back = packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        assert order is not None
        assert back is not None
        data, last = self._call(packed.data, tuple(part.index_select(1, order) for part in states), sizes)
        output, _ = pad_packed_sequence(PackedSequence(data, sizes, order, back), True, 0.0, x.shape[1])
        last = tuple(part.index_select(1, back) for part in last)
        if some_empty:
            output = output.masked_fill(empty[:, None, None], 0)
            pairs = zip(states, last, strict=True)
            last = tuple(torch.where(empty[:, None], old, new) for old, new in pairs)
        return output, last

    def _runs_itself(self, x: Tensor) -> bool:
        weights = self.weights_of(0, 0)
        if self._sequence() is None or x.device.type != "cpu" or not can_run(*weights):
            return False
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in (x, *weights))
        return learns and x.shape[1] >= LEAST_STEPS and len(x) > 0

    def _itself(self, x: Tensor, states: Parts, lengths: Tensor | None) -> tuple[Tensor, Parts]:
        """Quire's own function, layer by layer. Everything stays in the order of time in memory."""
        sequence = self._sequence()
        assert sequence is not None
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                weights = self._kernel_weights(self.weights_of(layer, direction))
                start = states[0][len(last)]
                output, end = sequence(x, start, *weights, reverse=direction == 1, lengths=lengths)
                outputs.append(output.transpose(0, 1))
                last.append(end)
            wide = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if layer + 1 < self.num_layers:
                wide = dropout(wide, self.dropout, self.training)
            x = wide.transpose(0, 1)
        return x, (torch.stack(last),)

    def _loop(self, x: Tensor, states: Parts, lengths: Tensor | None) -> tuple[Tensor, Parts]:
        if lengths is not None:
            x = x.masked_fill(~valid_steps(lengths, x).unsqueeze(-1), 0)
            if not torch.compiler.is_exporting():
                _check_range(lengths, x.shape[1])
        last: list[Parts] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                weight_ih, weight_hh, *biases = self.weights_of(layer, direction)
                bias_ih, bias_hh = biases or (None, None)
                step: Any = self._step(weight_hh, bias_hh)
                start: Any = _alone(tuple(part[len(last)] for part in states))
                a = linear(x, weight_ih, bias_ih)
                output, end = unroll(step, a, start, lengths, reverse=direction == 1)
                outputs.append(output)
                last.append((end,) if isinstance(end, Tensor) else end)
            x = torch.cat(outputs, -1)
            if layer + 1 < self.num_layers:
                x = dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(part) for part in zip(*last, strict=True))

    # Checks -----------------------------------------------------------------------------------

    def _check_inputs(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[-1] != self.input_size:
            raise InputError(
                f"inputs of shape {tuple(x.shape)} for {type(self).__name__}",
                expected=f"({'B, T' if self.batch_first else 'T, B'}, {self.input_size})",
                fix="add a batch dimension with x.unsqueeze, or build the layer with another input_size",
            )

    def _start(self, x: Tensor, state: State | None) -> Parts:
        shape = (self.num_layers * self.directions, x.shape[0], self.hidden_size)
        if state is None:
            return (x.new_zeros(shape),) * self.parts
        parts = (state,) if isinstance(state, Tensor) else tuple(state)
        if len(parts) != self.parts or any(tuple(part.shape) != shape for part in parts):
            raise InputError(
                f"a state of shape {' and '.join(str(tuple(part.shape)) for part in parts)}",
                expected=f"{shape}" if self.parts == 1 else f"a pair (h, c), each {shape}",
                fix="give None, or the state that this layer returned for as many sequences",
            )
        return tuple(part.contiguous() for part in parts)  # as cuDNN wants them

    def extra_repr(self) -> str:
        words = [f"{self.input_size}, {self.hidden_size}"]
        words += [f"num_layers={self.num_layers}"] if self.num_layers > 1 else []
        words += [f"dropout={self.dropout}"] if self.dropout else []
        plain = {"bias": True, "batch_first": True, "bidirectional": False}
        words += [f"{name}={value}" for name in plain if (value := getattr(self, name)) != plain[name]]
        return ", ".join(words)


def _check_range(lengths: Tensor, steps: int) -> None:
    wrong = lengths[(lengths < 0) | (lengths > steps)]
    if len(wrong):
        raise InputError(
            f"a length of {int(wrong[0])}",
            expected=f"0 to {steps}, the number of steps",
            fix="count the steps of each sequence without its padding",
        )


def _alone(parts: Parts) -> Any:
    return parts[0] if len(parts) == 1 else parts


@final
class RNN(Recurrent):
    """Elman's net, h_t = σ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh) with σ tanh or ReLU."""

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        **options: Any,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise unknown_name("nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, num_layers, **options)
        self.nonlinearity = nonlinearity

    def _kernel(self) -> Callable[..., Any]:
        return torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu

    def _step(self, weight_hh: Tensor, bias_hh: Tensor | None) -> Callable[..., Any]:
        return partial(elman_step, weight_hh=weight_hh, bias_hh=bias_hh, nonlinearity=self.nonlinearity)

    def _sequence(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return partial(elman_through_time, nonlinearity=self.nonlinearity)


@final
class LSTM(Recurrent):
    """c_t = σ(f)⊙c_{t−1} + σ(i)⊙tanh(g), h_t = σ(o)⊙tanh(c_t); the state is (h, c)."""

    gates = 4
    parts = 2

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name, parameter in self.named_parameters():
            if name.startswith("bias_ih"):  # b_ih + b_hh = 1
                parameter[self.hidden_size : 2 * self.hidden_size] = 1

    def _kernel(self) -> Callable[..., Any]:
        return torch.lstm

    def _step(self, weight_hh: Tensor, bias_hh: Tensor | None) -> Callable[..., Any]:
        return partial(lstm_step, weight_hh=weight_hh, bias_hh=bias_hh)


@final
class GRU(Recurrent):
    """h_t = (1−z)⊙n + z⊙h_{t−1}, n = tanh(W_in x_t + b_in + r⊙(W_hn h_{t−1} + b_hn)), as torch.nn has it.

    reset="before" puts r⊙h_{t−1} into the matrix product, as Cho has it; keeps="1-z" exchanges the roles of
    z and 1−z.
    """

    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        reset: Reset = "after",
        keeps: Keeps = "z",
        **options: Any,
    ) -> None:
        check_convention(reset, keeps)
        super().__init__(input_size, hidden_size, num_layers, **options)
        self.reset, self.keeps = reset, keeps

    def _kernel(self) -> Callable[..., Any] | None:
        return torch.gru if self.reset == "after" else None

    def _kernel_weights(self, weights: list[Tensor]) -> list[Tensor]:
        if self.keeps == "z":
            return weights
        # 1 − σ(a) = σ(−a): the other share of the old state is the same kernel with z's weights negated.
        return [torch.cat((r, -z, n)) for r, z, n in (weight.chunk(3) for weight in weights)]

    def _step(self, weight_hh: Tensor, bias_hh: Tensor | None) -> Callable[..., Any]:
        return partial(gru_step, weight_hh=weight_hh, bias_hh=bias_hh, reset=self.reset, keeps=self.keeps)

    def _sequence(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        return gru_through_time if self.reset == "after" else None

    def extra_repr(self) -> str:
        plain = (self.reset, self.keeps) == ("after", "z")
        return super().extra_repr() + ("" if plain else f", reset={self.reset}, keeps={self.keeps}")
