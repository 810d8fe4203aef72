"""Layers of equinox, which keeps PyTorch's layouts and names; biases have more dims."""

from bridge.adapt._adapter import Adapter, at, spatial
from bridge.adapt._derived import Derived, Term
from bridge.rules._rules import Rule


def linear(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """`nn.Linear` as `eqx.nn.Linear`: as it is."""
    return Adapter(_same(source, destination, "out in", bias, "out"))


def conv(source: str, destination: str, *, ndim: int, bias: bool = True) -> Adapter:
    """`nn.Conv1d`, `2d`, `3d` as those of equinox: the bias is `[out, 1, ...]`."""
    kernel = f"out in {spatial(ndim)}"
    rules = _same(source, destination, kernel, False)
    return Adapter(rules + _conv_bias(source, destination, ndim, bias))


def conv_transpose(
    source: str, destination: str, *, ndim: int, bias: bool = True
) -> Adapter:
    """`nn.ConvTranspose1d`, `2d`, `3d`, not grouped: flipped, and `[out, in, ...]`."""
    weight, space = at(source, "weight"), spatial(ndim)
    dims = tuple(range(2, 2 + ndim))
    name = f"{weight} flipped along {list(dims)}"
    layout = f"in out {space} -> out in {space}"
    rules = (Rule(name, at(destination, "weight"), layout),)
    derived = (Derived(name, (Term(weight, flip=dims),)),)
    return Adapter(rules + _conv_bias(source, destination, ndim, bias), derived)


def embedding(source: str, destination: str) -> Adapter:
    """`nn.Embedding` as `eqx.nn.Embedding`: as it is."""
    return Adapter(_same(source, destination, "vocab embed", False))


def norm(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """`nn.LayerNorm`, `GroupNorm`, `RMSNorm` as those of equinox: as they are."""
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
    layout = f"(out {ones}) -> out {ones}"
    rule = Rule(at(source, "bias"), at(destination, "bias"), layout)
    return (rule,) if bias else ()
