"""Adapters for flax layers; nnx and linen use the same leaf names."""

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
    """Maps `nn.Linear` to `Linear` or `Dense`: `[out, in]` becomes `[in, out]`.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      bias: Whether both have a bias.
      flattened: Shape `(channels, ...)` of the feature map, without batch dim, if the
        input is a flattened one: PyTorch flattens channels first, JAX channels last.

    Examples:
      >>> state = {"head.weight": np.ones((4, 3), np.float32)}
      >>> tree = {"head": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}}
      >>> rules = [bridge.adapt.linear("head", "head", bias=False)]
      >>> bridge.from_torch(state, tree, rules)["head"]["kernel"].shape
      (3, 4)
    """
    layout, sizes = "out in -> in out", {}
    if flattened is not None:
        space = spatial(len(flattened) - 1)
        layout = f"out (channels {space}) -> ({space} channels) out"
        sizes = dict(zip(["channels", *space.split()], flattened, strict=True))
    kernel = Rule(at(source, "weight"), at(destination, "kernel"), layout)
    return Adapter((kernel, *_bias(source, destination, bias)), sizes=sizes)


def conv(source: str, destination: str, *, ndim: int, bias: bool = True) -> Adapter:
    """Maps `nn.Conv1d`, `2d`, `3d` to `Conv`: `OIHW` becomes `HWIO`, grouped or not.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      ndim: Number of spatial dims: 1, 2 or 3.
      bias: Whether both have a bias.

    Examples:
      >>> state = {"head.weight": np.ones((8, 3, 5, 5), np.float32)}
      >>> tree = {"head": {"kernel": jax.ShapeDtypeStruct((5, 5, 3, 8), jnp.float32)}}
      >>> rules = [bridge.adapt.conv("head", "head", ndim=2, bias=False)]
      >>> bridge.from_torch(state, tree, rules)["head"]["kernel"].shape
      (5, 5, 3, 8)
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
    """Maps `nn.ConvTranspose1d`, `2d`, `3d` to `ConvTranspose`.

    PyTorch computes the gradient of a convolution, which applies its kernel
    `[in, out, ...]` spatially reversed. flax applies its kernel unreversed, so the
    kernel is flipped here, unless the flax module has `transpose_kernel`, which flips
    at call time and expects `[..., out, in]`.

    `padding=p` in PyTorch is `padding=dilation * (kernel_size - 1) - p` in flax.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      ndim: Number of spatial dims: 1, 2 or 3.
      transpose_kernel: Value of `transpose_kernel` of the flax module.
      bias: Whether both have a bias.
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
    """Maps `nn.Embedding` to `Embed`, with the table unchanged."""
    table = Rule(
        at(source, "weight"), at(destination, "embedding"), "vocab embed -> vocab embed"
    )
    return Adapter((table,))


def norm(source: str, destination: str, *, bias: bool = True) -> Adapter:
    """Maps `nn.LayerNorm`, `GroupNorm` or (with `bias=False`) `RMSNorm`.

    PyTorch's `weight` becomes `scale`. The default epsilon is 1e-6 in flax, 1e-5 in
    PyTorch.
    """
    scale = Rule(at(source, "weight"), at(destination, "scale"), "embed -> embed")
    return Adapter((scale, *_bias(source, destination, bias)))


def batch_norm(
    source: str, destination: str, *, stats: str | None = None, affine: bool = True
) -> Adapter:
    """Maps `nn.BatchNorm1d`, `2d`, `3d` to `BatchNorm`, including running statistics.

    `num_batches_tracked` has no counterpart: flax averages only by momentum. Its
    `momentum` is one minus PyTorch's.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      stats: Path of `mean` and `var` if not `destination`: `batch_stats.bn` in linen.
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
    """Maps `nn.MultiheadAttention` to `MultiHeadAttention`.

    Query, key and value kernels become `[embed, heads, head_dim]`.

    Args:
      source: Path of the module in PyTorch.
      destination: Path of the module in the tree.
      bias: Whether both have biases.
      fused: Whether PyTorch stores query, key and value as one `in_proj_weight`, which
        it does unless `kdim` or `vdim` differ from `embed_dim`.
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
