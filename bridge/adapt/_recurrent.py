"""Adapters for LSTM and GRU: order of the gates and conversion of the two biases.

PyTorch has one bias for the input and another for the hidden state. flax has a single
one, since the cell depends only on their sum, except for gate `n` of a GRU. Rules do
no arithmetic, so the caller chooses how two biases become one with `bias=`:

- `"ih"`: the input bias is used; the hidden one must be zero.
- `"sum"`: the two are added in their dtype. On export the sum becomes PyTorch's
  input bias, and the hidden one is zero.
"""

from collections.abc import Sequence
from typing import Literal

from bridge.adapt._adapter import Adapter, at
from bridge.adapt._derived import Derived, Term
from bridge.rules._rules import Rule

Bias = Literal["ih", "sum"]


def lstm(
    source: str,
    destination: str,
    *,
    bias: Bias,
    cell: Literal["nnx.OptimizedLSTMCell", "nnx.LSTMCell", "linen"] = (
        "nnx.OptimizedLSTMCell"
    ),
    suffix: str = "_l0",
) -> Adapter:
    """Maps one layer of `nn.LSTM`, or an `nn.LSTMCell`, to a flax cell.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the cell in the tree, such as `rnn.cell`.
      bias: Conversion of the two biases; see the module docstring.
      cell: Class of the cell; both linen classes have the same leaves.
      suffix: Suffix of PyTorch's names: `_l0`, `_l1`, `_l0_reverse`; empty for
        `LSTMCell`.
    """
    name, derived = _merged_bias(source, suffix, bias, [(0, 1)])
    weights = at(source, f"weight_ih{suffix}"), at(source, f"weight_hh{suffix}")
    if cell == "nnx.OptimizedLSTMCell":
        rules = _fused(weights, destination)
        biases: str | tuple[str, ...] = at(destination, "dense_h.bias")
    else:
        forget = "if_" if cell == "nnx.LSTMCell" else "if"
        rules = _by_gate(weights, destination, ("ii", forget, "ig", "io"), "ifgo")
        biases = tuple(at(destination, f"h{gate}.bias") for gate in "ifgo")
    return Adapter((*rules, Rule(name[0], biases, "hidden -> hidden")), derived)


def gru(
    source: str,
    destination: str,
    *,
    bias: Bias,
    cell: Literal["nnx.GRUCell", "linen"] = "nnx.GRUCell",
    suffix: str = "_l0",
) -> Adapter:
    """Maps one layer of `nn.GRU`, or an `nn.GRUCell`, to a flax cell.

    The hidden bias of gate `n` is scaled by gate `r`, so it cannot be merged with the
    input bias. linen has a separate bias for it; nnx has none, so there it must be
    zero.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the cell in the tree, such as `rnn.cell`.
      bias: Conversion of the two biases; see the module docstring.
      cell: Class of the cell.
      suffix: Suffix of PyTorch's names: `_l0`, `_l1`, `_l0_reverse`; empty for
        `GRUCell`.
    """
    weights = at(source, f"weight_ih{suffix}"), at(source, f"weight_hh{suffix}")
    # The biases of gates r and z (thirds 0 and 1) merge; those of n (third 2) do not.
    names, derived = _merged_bias(source, suffix, bias, [(0, 3), (1, 3)])
    hidden = Term(at(source, f"bias_hh{suffix}"), 2, 3)
    input_n = at(source, f"bias_ih{suffix}[2/3]")
    term_n = (Term(at(source, f"bias_ih{suffix}"), 2, 3),)
    if cell == "nnx.GRUCell":
        rules = _fused(weights, destination)
        merged = Rule(
            (*names, input_n), at(destination, "dense_i.bias"), "gate -> gate"
        )
        rules = (*rules, merged)
        derived += (Derived(input_n, term_n, zeros=(hidden,)),)
    else:
        rules = _by_gate(weights, destination, ("ir", "iz", "in"), "rzn")
        hidden_n = f"{hidden.tensor}[2/3]"
        leaves = [at(destination, f"{leaf}.bias") for leaf in ("ir", "iz", "in", "hn")]
        rules += tuple(
            Rule(name, leaf, "hidden -> hidden")
            for name, leaf in zip((*names, input_n, hidden_n), leaves, strict=True)
        )
        derived += (Derived(input_n, term_n), Derived(hidden_n, (hidden,)))
    return Adapter(rules, derived)


def _fused(weights: tuple[str, str], destination: str) -> tuple[Rule, ...]:
    layout = "gates embed -> embed gates"
    kernels = at(destination, "dense_i.kernel"), at(destination, "dense_h.kernel")
    return tuple(
        Rule(w, kernel, layout) for w, kernel in zip(weights, kernels, strict=True)
    )


def _by_gate(
    weights: tuple[str, str], destination: str, inputs: Sequence[str], gates: str
) -> tuple[Rule, ...]:
    layout = "hidden embed -> embed hidden"
    leaves = inputs, [f"h{gate}" for gate in gates]
    return tuple(
        Rule(w, tuple(at(destination, f"{leaf}.kernel") for leaf in names), layout)
        for w, names in zip(weights, leaves, strict=True)
    )


def _merged_bias(
    source: str, suffix: str, bias: Bias, shares: Sequence[tuple[int, int]]
) -> tuple[tuple[str, ...], tuple[Derived, ...]]:
    """Returns name and derived bias for each `(part, parts)` share of the two."""
    if bias not in ("ih", "sum"):
        raise ValueError(
            f"'{source}' has two biases and its counterpart one, and bias={bias!r} "
            "does not say how: 'ih' (the other must be zero) or 'sum'."
        )
    derived = []
    for part, parts in shares:
        where = "" if parts == 1 else f"[{part}/{parts}]"
        names = [at(source, f"bias_{side}{suffix}") for side in ("ih", "hh")]
        ih, hh = (Term(name, part, parts) for name in names)
        if bias == "sum":
            name = " + ".join(name + where for name in names)
            derived.append(Derived(name, (ih, hh)))
        else:
            derived.append(Derived(f"{names[0]}{where}", (ih,), zeros=(hh,)))
    return tuple(entry.name for entry in derived), tuple(derived)
