"""LSTM and GRU: gates in PyTorch's order, and the question of the two biases.

PyTorch adds a bias to the input and another to the hidden state. flax keeps one of
them, as their sum is all that the cell sees, but for the gate `n` of a GRU. A rule
adds nothing, so how two become one is for the caller to say, `bias=`:

- `"ih"`: the bias of the input is the bias; the other must be zero.
- `"sum"`: the two are added, in their dtype. On the way back the sum is PyTorch's
  bias of the input, and the other is zero.
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
    """One layer of `nn.LSTM`, or `nn.LSTMCell`, as a cell of flax.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the cell in the tree, such as `rnn.cell`.
      bias: How two biases become one; see the module.
      cell: Class of the cell; both of linen's have the same leaves.
      suffix: Ends PyTorch's names: `_l0`, `_l1`, `_l0_reverse`; empty for `LSTMCell`.
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
    """One layer of `nn.GRU`, or `nn.GRUCell`, as a cell of flax.

    The hidden state's bias of gate `n` is scaled by gate `r`, so it can be added to
    nothing. linen has a place for it; nnx has none, and there it must be zero.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the cell in the tree, such as `rnn.cell`.
      bias: How two biases become one; see the module.
      cell: Class of the cell.
      suffix: Ends PyTorch's names: `_l0`, `_l1`, `_l0_reverse`; empty for `GRUCell`.
    """
    weights = at(source, f"weight_ih{suffix}"), at(source, f"weight_hh{suffix}")
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
    """Returns one derived bias, and its name, for each share of the two."""
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
