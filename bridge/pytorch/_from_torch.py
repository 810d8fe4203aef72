"""PyTorch to JAX: loads the weights of any model, by given or proposed rules."""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.adapt._derived import derive
from bridge.pytorch._bind import bind
from bridge.pytorch._complete import complete
from bridge.pytorch._covered import Rules, derived_of, ignored_by, spell_out, ties_of
from bridge.pytorch._propose import propose_rules
from bridge.pytorch._target import read_target
from bridge.pytorch._torch_files import open_torch
from bridge.streaming._load import Progress, load


def from_torch(
    source: Any,
    like: Any,
    rules: Rules | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ignore: Sequence[str] = (),
    prefix: str = "",
    progress: Progress | None = None,
) -> Any:
    """Loads the weights of a PyTorch model into a JAX model.

    Exactly one rule must cover every tensor and every leaf; nothing is matched by
    shape. Weights are cast between floating dtypes to those of `like`, and created
    directly in its shardings.

    ```python
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    rules = [adapt.conv("stem", "stem", ndim=2), adapt.linear("head", "head")]
    model = bridge.from_torch(torch_net, model, rules)
    ```

    Tied tensors, which share memory under several names, need only one rule.

    Args:
      source: An `nn.Module`, a state dict (tensors or numpy arrays by name), or the
        path of a `.safetensors`, `.pt` or `.bin` file or of a directory with them.
        Pickles are parsed as data, never executed.
      like: Model to load: a flax.nnx model or `nnx.State`, linen variables, an
        equinox module, or any pytree; with arrays or `jax.ShapeDtypeStruct`s as
        leaves, with or without shardings.
      rules: `bridge.Rule`s and adapters (`bridge.adapt`). A `{name}` in a destination
        stands for each number in its place, in the sources too: one rule for all
        layers of a list. None uses the rules of
        `propose_rules`, if none of them is in doubt.
      sizes: Sizes, by name, of dims that cannot be inferred from shapes.
      ignore: Patterns of tensors to ignore; `{name}` matches a number, `**` matches
        anything.
      prefix: Prefix of the tensors to load, which is removed from their names:
        `"model."` of a training checkpoint, `"module."` of a wrapped model.
      progress: Callback, called with bytes done and total bytes after each tensor.

    Returns:
      Copy of `like` with the weights loaded. Random states and leaves that are not
      arrays are those of `like`, which is not modified: of `nnx.eval_shape` they are
      abstract, until `flax.nnx.reseed(model, default=0)`.

    Raises:
      FileNotFoundError: If the path does not exist.
      ValueError: If source, rules and `like` do not match (all mismatches are listed,
        before a weight is read), or if the proposal is in doubt: it is then printed,
        as code to be corrected.

    Examples:
      >>> state = {"head.weight": np.ones((4, 3), np.float32)}
      >>> tree = {"head": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)}}
      >>> rules = [bridge.adapt.linear("head", "head", bias=False)]
      >>> bridge.from_torch(state, tree, rules)
      {'head': {'kernel': Array([[1., 1., 1., 1.],
             [1., 1., 1., 1.],
             [1., 1., 1., 1.]], dtype=float32)}}
    """
    tensors, target = open_torch(source, prefix), read_target(like)
    if rules is None:
        rules = propose_rules(
            source, like, ignore=ignore, prefix=prefix
        ).certain_rules()
    leaves = target.structs
    rules = complete(rules, {name: leaf.shape for name, leaf in leaves.items()})
    derived = derived_of(rules)
    adapted = derive(tensors, derived)
    sized = spell_out(rules, sizes or {})
    spare = {*ignored_by(rules, ignore, adapted.keys()), *ties_of(tensors, rules)}
    mapping = bind(sized, leaves, adapted, spare)
    return target.fill(load(adapted, mapping, leaves, progress=progress))
