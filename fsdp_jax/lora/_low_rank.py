"""Weights with low-rank factors, and functions of weights that do not add them up.

The function is traced with the plain weight and evaluated again, equation by equation.
Where it multiplies by the weight, the input is multiplied by the factors one after the
other. That is less work than the gradient of the sum, and the sum would round a small
product away in bfloat16. Any other use of the weight computes the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float, Key

from fsdp_jax._jaxpr import function_of
from fsdp_jax._tree import PyTree

_Run = Callable[[Sequence[Any]], Sequence[Any]]
"""Evaluates one equation on arrays in place of its own operands."""


@dataclasses.dataclass(frozen=True)
class Factored:
    """Stands for `base + a @ b`, contracted over the rank.

    Attributes:
      name: Path of the weight, for errors.
      base: Frozen weight.
      a: First factor times the scale, shape `[*inputs, rank]`.
      b: Second factor, shape `[rank, *outputs]`.
      a_dims: Dim of `base` for each dim of `a` except the rank.
      b_dims: Dim of `base` for each dim of `b` except the rank.
      dropout: Share of the inputs of `a` that are zero.
      key: PRNG key for dropout; None without dropout.
    """

    name: str
    base: Float[Array, ...]
    a: Float[Array, "... rank"]
    b: Float[Array, "rank ..."]
    a_dims: tuple[int, ...]
    b_dims: tuple[int, ...]
    dropout: float = 0.0
    key: Key[Array, ""] | None = None

    def total(self) -> Float[Array, ...]:
        """Returns the sum, computed in the factors' dtype and rounded to the base's.

        Raises:
          ValueError: If there is dropout, which needs the input.
        """
        if self.dropout:
            raise ValueError(
                f"'{self.name}' is not only multiplied with an input, and "
                f"dropout={self.dropout} of the factors applies to that input. Leave "
                "it out of `targets`, or use LoRAConfig(dropout=0.0)."
            )
        product = jnp.tensordot(self.a, self.b, 1)
        product = jnp.transpose(product, _inverse((*self.a_dims, *self.b_dims)))
        wide = jnp.promote_types(self.base.dtype, product.dtype)
        return (self.base.astype(wide) + product).astype(self.base.dtype)

    def dropped(self, x: Array) -> Array:
        """Casts the input to the factors' dtype and applies dropout."""
        x = x.astype(self.a.dtype)
        if not self.dropout:
            return x
        assert self.key is not None
        keep = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
        return jnp.where(keep, x / (1 - self.dropout), 0)


def call_with_factors(
    fn: Callable[..., PyTree], weights: Sequence[Array | Factored], *args: PyTree
) -> PyTree:
    """Evaluates `fn(weights, *args)`, where some weights are `Factored`."""
    if not any(isinstance(weight, Factored) for weight in weights):
        return fn(list(weights), *args)
    plain = [w.base if isinstance(w, Factored) else w for w in weights]
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(plain, *args)
    leaves = _evaluate(closed, [*weights, *jax.tree.leaves(args)])
    return jax.tree.structure(shape).unflatten(map(_plain, leaves))


def _evaluate(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with `Factored` among its inputs; its results may be, too."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        env.update(zip(eqn.outvars, _apply(closed, eqn, values), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(closed: core.ClosedJaxpr, eqn: Any, values: list[Any]) -> Sequence[Any]:
    run = functools.partial(_run, closed, eqn)
    if any(isinstance(value, Factored) for value in values):
        # Inlined, so that factors stay apart inside of jit ("pjit" in older jax).
        if eqn.primitive.name in ("jit", "pjit"):
            return _evaluate(eqn.params["jaxpr"], values)
        if (rule := _RULES.get(eqn.primitive.name)) is not None:
            return [rule(run, eqn.params, values)]
    return run([_plain(value) for value in values])


def _run(closed: core.ClosedJaxpr, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one equation on arrays."""
    # `function_of` keeps the constants of the program: they are not inputs.
    constants = set(closed.jaxpr.constvars)
    given = {
        v: value
        for v, value in zip(eqn.invars, values, strict=True)
        if isinstance(v, core.Var) and v not in constants
    }
    kept = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    results = function_of(closed, list(given), kept, [eqn])(*given.values())
    found = dict(zip(kept, results, strict=True))
    return [found.get(v) for v in eqn.outvars]


def _plain(value: Any) -> Any:
    return value.total() if isinstance(value, Factored) else value


def _transpose(run: _Run, params: dict[str, Any], values: list[Any]) -> Factored:
    (weight,) = values
    moved = _inverse(params["permutation"])
    (base,) = run([weight.base])
    return dataclasses.replace(
        weight,
        base=base,
        a_dims=tuple(moved[dim] for dim in weight.a_dims),
        b_dims=tuple(moved[dim] for dim in weight.b_dims),
    )


def _convert(run: _Run, params: dict[str, Any], values: list[Any]) -> Factored:
    del params
    (base,) = run([values[0].base])
    return dataclasses.replace(values[0], base=base)


def _dot(run: _Run, params: dict[str, Any], values: list[Any]) -> Array:
    """Computes `x @ (base + a @ b)` as `x @ base + (x @ a) @ b`, if dims allow that."""
    at = next(i for i, value in enumerate(values) if isinstance(value, Factored))
    weight, x = values[at], _plain(values[1 - at])
    contracted, batch = params["dimension_numbers"]
    dims = set(contracted[at])
    # Contracted over all inputs, or, in a transposed use, over all outputs; no other
    # product can be applied factor by factor.
    if batch[at] or dims not in (set(weight.a_dims), set(weight.b_dims)):
        return run([_plain(value) for value in values])[0]
    y = run([weight.base, x] if at == 0 else [x, weight.base])[0]
    # einsum letters: `w` for dims of the weight, `xs` for those of the input. `met`
    # maps each contracted dim of the input to that of the weight.
    letters = iter(string.ascii_letters)
    w = [next(letters) for _ in range(weight.base.ndim)]
    met = dict(zip(contracted[1 - at], contracted[at], strict=True))
    xs = [w[met[dim]] if dim in met else next(letters) for dim in range(x.ndim)]
    rank = next(letters)
    free_w = [letter for dim, letter in enumerate(w) if dim not in dims]
    free_x = [letter for dim, letter in enumerate(xs) if dim not in met]
    a = [w[dim] for dim in weight.a_dims] + [rank]
    b = [rank] + [w[dim] for dim in weight.b_dims]
    factors = [(weight.a, a), (weight.b, b)]
    (first, f), (second, s) = factors if dims == set(weight.a_dims) else factors[::-1]
    given = {"precision": params["precision"]}
    low = jnp.einsum(_spec(xs, f, [*free_x, rank]), weight.dropped(x), first, **given)
    free = free_w + free_x if at == 0 else free_x + free_w
    delta = jnp.einsum(_spec([*free_x, rank], s, free), low, second, **given)
    # Added in the wider dtype, then rounded once.
    wide = jnp.promote_types(y.dtype, delta.dtype)
    return (y.astype(wide) + delta).astype(y.dtype)


_RULES: dict[str, Callable[[_Run, dict[str, Any], list[Any]], Any]] = {
    "convert_element_type": _convert,
    "dot_general": _dot,
    "transpose": _transpose,
}
"""Primitives that keep the factors apart; all others compute the sum."""


def _spec(left: Sequence[str], right: Sequence[str], out: Sequence[str]) -> str:
    return f"{''.join(left)},{''.join(right)}->{''.join(out)}"


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=lambda i: permutation[i]))
