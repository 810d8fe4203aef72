"""XLA's order of the two products that the backward pass of one product has."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fsdp_jax.planner.liveness._lifetimes import BARRIER, KERNELS, VIEWS
from fsdp_jax.planner.liveness._operations import Operation, Value

_PRODUCT = "dot_general"
_SAME = VIEWS | {"transpose", "convert_element_type"}


class _Chain(NamedTuple):
    """What follows a value.

    Attributes:
      depth: Kernels on the longest path from the value to the program's end.
      next_product: Number of the first product that reads the value, directly or
        through fused operations; None if there is none.
    """

    depth: int
    next_product: int | None


_END = _Chain(0, None)


def with_late_products(operations: Sequence[Operation]) -> list[Operation]:
    """Moves the product with the shorter chain behind the other's elementwise values.

    Of two products that read one cotangent, XLA's scheduler runs first the one with the
    longer chain of dependents. In the backward pass of attention that is the gradient
    of the probabilities; that of the values comes after the gradient of the scores:

    | operation | probabilities | their gradient | gradient of the scores |
    |---|---|---|---|
    | gradient of the probabilities | in memory | made | |
    | gradient of the scores | in memory | in memory | made |
    | gradient of the values | in memory | | in memory |

    In the order of the trace the probabilities would be freed before the last is made.
    Gradients of weights, which no product reads, stay where they are.

    Args:
      operations: Operations in an order in which they can run.

    Returns:
      The same operations in another such order.
    """
    chains = _chains(operations)
    late = dict(_late(operations, chains))
    found: list[Operation] = []
    waiting: list[Operation] = []
    missing: set[Value] = set()
    until: set[int] = set()
    for i, operation in enumerate(operations):
        reads_missing = not missing.isdisjoint(operation.inputs)
        if i in late or (reads_missing and operation.name not in KERNELS):
            waiting.append(operation)
            missing.update(operation.outputs)
            if i in late:
                until.add(late[i])
            continue
        if reads_missing or i in until:
            found += waiting
            waiting, missing, until = [], set(), set()
        found.append(operation)
    return found + waiting


def _chains(operations: Sequence[Operation]) -> list[_Chain]:
    """Returns what follows the first result of each operation."""
    chains: dict[Value, _Chain] = collections.defaultdict(lambda: _END)
    found: list[_Chain] = []
    for i in reversed(range(len(operations))):
        operation = operations[i]
        found.append(chains[operation.outputs[0]] if operation.outputs else _END)
        # A barrier passes each operand on by itself.
        is_barrier = operation.name == BARRIER
        after = [chains[value] for value in operation.outputs] or [_END]
        if operation.name in KERNELS:
            product = i if operation.name == _PRODUCT else None
            after = [_Chain(1 + max(chain.depth for chain in after), product)]
        for at, value in enumerate(operation.inputs):
            if value is not None:
                behind = [after[at]] if is_barrier else after
                chains[value] = _joined([chains[value], *behind])
    return found[::-1]


def _joined(chains: Sequence[_Chain]) -> _Chain:
    products = [one.next_product for one in chains if one.next_product is not None]
    return _Chain(max(one.depth for one in chains), min(products, default=None))


def _late(
    operations: Sequence[Operation], chains: Sequence[_Chain]
) -> Iterator[tuple[int, int]]:
    """Yields the numbers of products, each with that of the product it runs before."""
    for pair in _with_one_operand(operations).values():
        if len(pair) != 2:
            continue
        short, long = sorted(pair, key=lambda i: chains[i].depth)
        waits_for = chains[long].next_product
        if chains[short].depth == chains[long].depth or waits_for is None:
            continue
        if chains[short].next_product is not None and short < waits_for:
            yield short, waits_for


def _with_one_operand(operations: Sequence[Operation]) -> Mapping[Value, list[int]]:
    """Maps values to the numbers of the products that read them, or a view of them."""
    sources: dict[Value, Value] = {}
    found: dict[Value, list[int]] = collections.defaultdict(list)
    for i, operation in enumerate(operations):
        if operation.name in _SAME:
            for made, read in zip(operation.outputs, operation.inputs, strict=False):
                if read is not None:
                    sources[made] = sources.get(read, read)
        if operation.name == _PRODUCT:
            for value in dict.fromkeys(operation.inputs):
                if value is not None:
                    found[sources.get(value, value)].append(i)
    return found
