"""PyTorch to JAX: any model's weights, by rules that are said or proposed."""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.adapt._derived import derive
from bridge.pytorch._bind import bind
from bridge.pytorch._mould import read_mould
from bridge.pytorch._propose import propose_rules
from bridge.pytorch._spoken import Rules, derived_of, ignored_by, spell_out, ties_of
from bridge.pytorch._torch_files import open_torch
from bridge.streaming._load import Progress, load


def from_torch(
    source: Any,
    mould: Any,
    rules: Rules | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ignore: Sequence[str] = (),
    prefix: str = "",
    progress: Progress | None = None,
) -> Any:
    """Fills a model with the weights of a PyTorch model.

    Every tensor and every leaf is spoken of by one rule, or is an error; nothing is
    matched by its shape. Weights are cast between floating dtypes as the mould asks,
    and born in its shardings.

    ```python
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    rules = [adapt.conv("stem", "stem", ndim=2), adapt.linear("head", "head")]
    model = bridge.from_torch(torch_net, model, rules)
    ```

    Two names of one tensor, tied by sharing memory, need one rule between them.

    Args:
      source: An `nn.Module`, a state dict (tensors or numpy arrays by name), or the
        path of a `.safetensors`, `.pt` or `.bin` file or of a directory with them. No
        pickle is run.
      mould: A flax.nnx model or `nnx.State`, linen's variables, an equinox module, or
        any pytree; of arrays or of `jax.ShapeDtypeStruct`, with or without shardings.
      rules: `bridge.Rule`s and adapters (`bridge.adapt`). None proposes them, and
        takes the proposal only if nothing in it is in doubt; see `propose_rules`.
      sizes: Sizes of dims that the rules name and that no shape tells, by name.
      ignore: Names of tensors that nobody needs; `{name}` stands for a number, `**`
        for anything.
      prefix: Take the tensors whose names begin so, under the rest of their names:
        `"model."` of a training checkpoint, `"module."` of a wrapped model.
      progress: Called with bytes done, and bytes in all, after each tensor.

    Returns:
      The mould again, with the weights in it. Random states and leaves that are no
      arrays are the mould's own; the mould itself is not changed.

    Raises:
      FileNotFoundError: If nothing is at the path.
      ValueError: If source, rules and mould do not fit (everything that does not is
        listed, before a weight is read), or if the proposal is in doubt: it is then
        printed, as code to be corrected.
    """
    tensors, target = open_torch(source, prefix), read_mould(mould)
    if rules is None:
        rules = propose_rules(
            source, mould, ignore=ignore, prefix=prefix
        ).certain_rules()
    leaves = target.structs
    derived = derived_of(rules)
    adapted = derive(tensors, derived)
    sized = spell_out(rules, sizes or {})
    spare = {*ignored_by(rules, ignore, adapted.keys()), *ties_of(tensors, rules)}
    mapping = bind(sized, leaves, adapted, spare)
    return target.fill(load(adapted, mapping, leaves, progress=progress))
