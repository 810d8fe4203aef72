"""Layers of flax, nnx and linen alike: the names of their leaves are the same."""

from bridge.adapt._adapter import Adapter, at, spatial
from bridge.adapt._derived import Derived, Term
from bridge.rules._rules import Rule


def linear(
    source: str,
    destination: str,
    *,
    bias: bool = True,
    flattened: tuple[int, ...] | None = None,
) -> Adapter:
    """`nn.Linear` as `Linear` or `Dense`: `[out, in]` becomes `[in, out]`.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      bias: Whether both have one.
      flattened: If the input is a flattened feature map, its `(channels, ...)` shape
        without the batch: PyTorch flattens channels first, JAX last.
    """
    layout, sizes = "out in -> in out", {}
    if flattened is not None:
        space = spatial(len(flattened) - 1)
        layout = f"out (channels {space}) -> ({space} channels) out"
        sizes = dict(zip(["channels", *space.split()], flattened, strict=True))
    kernel = Rule(at(source, "weight"), at(destination, "kernel"), layout)
    return Adapter((kernel, *_bias(source, destination, bias)), sizes=sizes)


def conv(source: str, destination: str, *, ndim: int, bias: bool = True) -> Adapter:
    """`nn.Conv1d`, `2d`, `3d` as `Conv`: `OIHW` becomes `HWIO`, grouped or not.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      ndim: Spatial dims: 1, 2 or 3.
      bias: Whether both have one.
    """
    space = spatial(ndim)
    layout = f"out in {space} -> {space} in out"
    kernel = Rule(at(source, "weight"), at(destination, "kernel"), layout)
    return Adapter((kernel, *_bias(source, destination, bias)))


def conv_transpose(
    source: str,
    destination: str,
    *,
    ndim: int,
    transpose_kernel: bool = False,
    bias: bool = True,
) -> Adapter:
    """`nn.ConvTranspose1d`, `2d`, `3d` as `ConvTranspose`.

    PyTorch's is the gradient of a convolution, whose kernel, `[in, out, ...]`, runs
    backwards. flax reads its kernel forwards, so it is flipped; unless the module has
    `transpose_kernel`, which flips when it is called and wants `[..., out, in]`.

    `padding=p` in PyTorch is `padding=dilation * (kernel_size - 1) - p` in flax.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      ndim: Spatial dims: 1, 2 or 3.
      transpose_kernel: As the flax module has it.
      bias: Whether both have one.
    """
    space, weight = spatial(ndim), at(source, "weight")
    if transpose_kernel:
        layout, derived = f"in out {space} -> {space} out in", ()
    else:
        dims = tuple(range(2, 2 + ndim))
        name = f"{weight} flipped along {list(dims)}"
        layout = f"in out {space} -> {space} in out"
        derived = (Derived(name, (Term(weight, flip=dims),)),)
        weight = name
    kernel = Rule(weight, at(destination, "kernel"), layout)
    return Adapter((kernel, *_bias(source, destination, bias)), derived)


def embedding(source: str, destination: str) -> Adapter:
    """`nn.Embedding` as `Embed`: the table, as it is."""
    table = Rule(
        at(source, "weight"), at(destination, "embedding"), "vocab embed -> vocab embed"
    )
    return Adapter((table,))


def norm(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """`nn.LayerNorm`, `GroupNorm` (and `RMSNorm`, with `bias=False`): weight is scale.

    flax's epsilon is 1e-6 by default, PyTorch's 1e-5.
    """
    scale = Rule(at(source, "weight"), at(destination, "scale"), "embed -> embed")
    return Adapter((scale, *_bias(source, destination, bias)))


def batch_norm(
    source: str, destination: str, *, stats: str | None = None, affine: bool = True
) -> Adapter:
    """`nn.BatchNorm1d`, `2d`, `3d` as `BatchNorm`, running statistics included.

    `num_batches_tracked` has no counterpart: flax averages by momentum alone. Its
    `momentum` is one minus PyTorch's.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      stats: Path of `mean` and `var` where it is another: `batch_stats.bn` in linen.
      affine: Whether both have scale and bias.
    """
    stats = destination if stats is None else stats
    statistics = (
        Rule(at(source, "running_mean"), at(stats, "mean"), "embed -> embed"),
        Rule(at(source, "running_var"), at(stats, "var"), "embed -> embed"),
    )
    rules = norm(source, destination).rules if affine else ()
    return Adapter(rules + statistics, ignore=(at(source, "num_batches_tracked"),))


def attention(
    source: str, destination: str, *, bias: bool = True, fused: bool = True
) -> Adapter:
    """`nn.MultiheadAttention` as `MultiHeadAttention`: `[embed, heads, head_dim]`.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      bias: Whether both have biases.
      fused: Whether PyTorch keeps the three as one `in_proj_weight`, which it does
        unless `kdim` or `vdim` differ from `embed_dim`.
    """
    names = ("query", "key", "value")
    kernels = tuple(at(destination, f"{name}.kernel") for name in names)
    layout = "(heads head_dim) embed -> embed heads head_dim"
    if fused:
        rules = [Rule(at(source, "in_proj_weight"), kernels, layout)]
    else:
        rules = [
            Rule(at(source, f"{name[0]}_proj_weight"), kernel, layout)
            for name, kernel in zip(names, kernels, strict=True)
        ]
    output = "embed (heads head_dim) -> heads head_dim embed"
    rules.append(
        Rule(at(source, "out_proj.weight"), at(destination, "out.kernel"), output)
    )
    if bias:
        biases = tuple(at(destination, f"{name}.bias") for name in names)
        flat = "(heads head_dim) -> heads head_dim"
        rules.append(Rule(at(source, "in_proj_bias"), biases, flat))
        rules += _bias(at(source, "out_proj"), at(destination, "out"), bias)
    return Adapter(tuple(rules))


def _bias(source: str, destination: str, bias: bool) -> tuple[Rule, ...]:
    rule = Rule(at(source, "bias"), at(destination, "bias"), "out -> out")
    return (rule,) if bias else ()
