"""JAX to PyTorch: applies the inverse of the rules of `from_torch`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from bridge._tree import arrays_of
from bridge.adapt._derived import derive, underive
from bridge.pytorch._back import follow_back
from bridge.pytorch._bind import bind
from bridge.pytorch._complete import complete
from bridge.pytorch._covered import Rules, derived_of, ignored_by, spell_out, ties_of
from bridge.pytorch._target import read_target
from bridge.pytorch._torch_files import open_torch
from bridge.pytorch._torch_source import to_tensor


def to_torch(
    tree: Any,
    rules: Rules,
    like: Any = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Converts the weights of a JAX model to a PyTorch state dict.

    It is the bit-exact inverse of `from_torch` with the same rules, except for casts
    and for biases that were summed on request. Weights are gathered on the host.

    Args:
      tree: Model or pytree, as in `from_torch`, of fully addressable arrays.
      rules: Rules and adapters, as in `from_torch`.
      like: Source, as in `from_torch`, that determines the dtypes, the names of tied
        tensors, and the values of ignored tensors (`num_batches_tracked`). None keeps
        the dtypes of the leaves.
      sizes: Sizes, by name, of dims that cannot be inferred from shapes.
      ignore: Patterns of tensors to copy from `like` instead; `{name}` matches a
        number, `**` matches anything.

    Returns:
      A `torch.Tensor` on the host for each name, in the order of `like`, else of the
      rules; tied names share one tensor.

    Raises:
      ValueError: If tree, rules and `like` do not match. All mismatches are listed.

    Examples:
      >>> rules = [bridge.Rule("head.weight", "head.kernel", "out in -> in out")]
      >>> state = bridge.to_torch({"head": {"kernel": jnp.ones((3, 4))}}, rules)
      >>> tuple(state["head.weight"].shape)
      (4, 3)
    """
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    leaves = jax.device_get(read_target(arrays_of(tree)).leaves)
    if empty := [n for n, x in leaves.items() if isinstance(x, jax.ShapeDtypeStruct)]:
        raise ValueError(
            f"The tree is abstract: it has no values in {', '.join(empty)}."
        )
    rules = complete(rules, {name: leaf.shape for name, leaf in leaves.items()})
    derived, sized = derived_of(rules), spell_out(rules, sizes or {})
    if like is None:
        made = follow_back(bind(sized, leaves, None), leaves)
        return {key: to_tensor(a) for key, a in underive(made, derived).items()}
    model = open_torch(like)
    adapted = derive(model, derived, check_zeros=False)
    kept, tied = ignored_by(rules, ignore, adapted.keys()), ties_of(model, rules)
    made = follow_back(bind(sized, leaves, adapted, {*kept, *tied}), leaves, adapted)
    # Copied, as `read` may return a view of the memory of `like`.
    arrays = underive(made, derived) | {key: model.read(key).copy() for key in kept}
    tensors = {key: to_tensor(array) for key, array in arrays.items()}
    return {key: tensors[tied.get(key, key)] for key in model.keys()}
