"""Adapters for equinox layers: PyTorch's names and layouts, except conv biases."""

from bridge.adapt._adapter import Adapter, at, spatial
from bridge.adapt._derived import Derived, Term
from bridge.rules._rules import Rule


def linear(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """Maps `nn.Linear` to `eqx.nn.Linear`, unchanged."""
    return Adapter(_same(source, destination, "out in", bias, "out"))


def conv(source: str, destination: str, *, ndim: int, bias: bool = True) -> Adapter:
    """Maps `nn.Conv1d`, `2d`, `3d` to `eqx.nn.Conv`; the bias is `[out, 1, ...]`."""
    kernel = f"out in {spatial(ndim)}"
    rules = _same(source, destination, kernel, False)
    return Adapter(rules + _conv_bias(source, destination, ndim, bias))


def conv_transpose(
    source: str, destination: str, *, ndim: int, bias: bool = True
) -> Adapter:
    """Maps ungrouped `nn.ConvTranspose1d`, `2d`, `3d` to `eqx.nn.ConvTranspose`.

    The kernel `[in, out, ...]` is flipped spatially and becomes `[out, in, ...]`.
    """
    weight, space = at(source, "weight"), spatial(ndim)
    dims = tuple(range(2, 2 + ndim))
    name = f"{weight} flipped along {list(dims)}"
    layout = f"in out {space} -> out in {space}"
    rules = (Rule(name, at(destination, "weight"), layout),)
    derived = (Derived(name, (Term(weight, flip=dims),)),)
    return Adapter(rules + _conv_bias(source, destination, ndim, bias), derived)


def embedding(source: str, destination: str) -> Adapter:
    """Maps `nn.Embedding` to `eqx.nn.Embedding`, unchanged."""
    return Adapter(_same(source, destination, "vocab embed", False))


def norm(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """Maps `nn.LayerNorm`, `GroupNorm`, `RMSNorm` to equinox's, unchanged."""
    return Adapter(_same(source, destination, "embed", bias, "embed"))


def _same(
    source: str, destination: str, weight: str, bias: bool, bias_dims: str = ""
) -> tuple[Rule, ...]:
    rules = Rule(
        at(source, "weight"), at(destination, "weight"), f"{weight} -> {weight}"
    )
    if not bias:
        return (rules,)
    layout = f"{bias_dims} -> {bias_dims}"
    return (rules, Rule(at(source, "bias"), at(destination, "bias"), layout))


def _conv_bias(
    source: str, destination: str, ndim: int, bias: bool
) -> tuple[Rule, ...]:
    ones = " ".join(f"one{dim}" for dim in range(ndim))
    # Factors of size 1 become the trailing dims of the bias.
    layout = f"(out {ones}) -> out {ones}"
    rule = Rule(at(source, "bias"), at(destination, "bias"), layout)
    return (rule,) if bias else ()
