"""Distribution of a layer-wise optimizer's matrices by their Newton-Schulz work.

Every device has as many slots of each stack as any other, since one program runs on
all. Where the devices do not divide a stack, some have one matrix more than others:
those that have the least work of the other stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from fsdp_jax.optim._matrix_stack import StackLayout


@dataclasses.dataclass(frozen=True)
class LayerWiseWork:
    """Work of each device in a step of `layer_wise`, up to a constant factor.

    Of a matrix of `m` rows and `n` columns it is `min(m, n)**2 * max(m, n)`, to which
    the cost of a Newton-Schulz iteration is proportional.

    Attributes:
      loads: Work of each device on the matrices that it owns, in the mesh's order.
      with_zeros: Work of every device if zero matrices are updated too.
      largest: Work of the largest matrix.
    """

    loads: tuple[int, ...]
    with_zeros: int
    largest: int

    @property
    def maximum(self) -> int:
        """Work of the device that has most: the others wait for it."""
        return max(self.loads)

    @property
    def bound(self) -> int:
        """Work below which no distribution of whole matrices has its maximum."""
        return max(self.largest, -(-sum(self.loads) // len(self.loads)))

    def __str__(self) -> str:
        """Returns one line: the maximum over devices, with what it is compared with."""
        over, zeros = (
            work / self.bound if self.bound else 1.0
            for work in (self.maximum, self.with_zeros)
        )
        return (
            f"layer-wise work of a device: at most {self.maximum:.3g}, {over:.2f} "
            f"times the lower bound {self.bound:.3g} ({zeros:.2f} times with zero "
            "matrices)"
        )


def balanced(layouts: Mapping[str, StackLayout]) -> dict[str, StackLayout]:
    """Returns layouts in which devices with little work own the matrices left over.

    Stacks of expensive matrices come first: the longest processing time first, as in
    Megatron. A device owns at most one matrix of those left over from a stack, so that
    no stack becomes longer. If all stacks have the same owners, two of them differ by
    the work of one matrix at most: only one that has no more than the other gets more.

    Args:
      layouts: Layout of each stack, by name.

    Source: Megatron-LM `layer_wise_optimizer.py::_compute_per_buffer_param_layout`
      (there matrices of all shapes are assigned one by one; here no more of a shape
      than stacks of equal length have room for).
    """
    if not layouts:
        return {}
    mesh = next(iter(layouts.values())).mesh
    loads = np.zeros(tuple(mesh.shape.values()), np.int64)
    fuller = {}
    for name in sorted(layouts, key=lambda name: -matrix_work(layouts[name])):
        layout = layouts[name]
        by_owner = _by_owner(loads, layout)
        left = layout.count % layout.num_owners
        order = np.argsort(by_owner.max(axis=1), kind="stable")
        fuller[name] = tuple(sorted(order[:left].tolist()))
        _add(loads, dataclasses.replace(layout, fuller=fuller[name]))
    return {
        name: dataclasses.replace(layout, fuller=fuller[name])
        for name, layout in layouts.items()
    }


def work_of(layouts: Mapping[str, StackLayout]) -> LayerWiseWork:
    """Returns the work of each device of the layouts' mesh."""
    if not layouts:
        return LayerWiseWork((0,), 0, 0)
    mesh = next(iter(layouts.values())).mesh
    loads = np.zeros(tuple(mesh.shape.values()), np.int64)
    for layout in layouts.values():
        _add(loads, layout)
    slots = {name: layout.num_slots for name, layout in layouts.items()}
    works = {name: matrix_work(layout) for name, layout in layouts.items()}
    with_zeros = sum(slots[name] * works[name] for name in layouts)
    return LayerWiseWork(
        tuple(loads.reshape(-1).tolist()), with_zeros, max(works.values())
    )


def matrix_work(layout: StackLayout) -> int:
    """Returns the work of one matrix of a stack."""
    small, large = sorted(layout.matrix)
    return small**2 * large


def _add(loads: np.ndarray, layout: StackLayout) -> None:
    """Adds the work of a stack's matrices to its owners' loads."""
    owned = np.asarray(layout.num_owned, np.int64) * matrix_work(layout)
    by_owner = _by_owner(loads, layout) + owned[:, None]
    axes = _axes_in_order(loads, layout)
    turned = by_owner.reshape([loads.shape[axis] for axis in axes])
    loads[...] = turned.transpose(np.argsort(axes))


def _by_owner(loads: np.ndarray, layout: StackLayout) -> np.ndarray:
    """Returns the loads as an array `[owners, devices that own the same]`."""
    turned = loads.transpose(_axes_in_order(loads, layout))
    return turned.reshape(layout.num_owners, -1)


def _axes_in_order(loads: np.ndarray, layout: StackLayout) -> list[int]:
    names = list(layout.mesh.shape)
    owners = [names.index(axis) for axis in layout.owners]
    return [*owners, *(axis for axis in range(loads.ndim) if axis not in owners)]
