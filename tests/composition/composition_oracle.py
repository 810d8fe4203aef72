"""A composition on a mesh against the same on one device, in jax and optax alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from composition.composed_loss import Ran
from composition.composed_on_mesh import run_sharded
from composition.composed_on_one_device import run_plainly
from composition.compositions import Composition

KINDS = ("agree", "refused", "differ")
# float64: what differs is the order of sums. A weight that is cast has a gradient that
# is rounded to its dtype, once for each rank and microbatch here, and once there. A
# gradient that is communicated or summed in another dtype is rounded here alone. What a
# tied weight gets from both ends cancels: to 1/700 in a case in which float64 is 7e-14
# off, and float32 4e-5.
TOLERANCES = {
    "none": 1e-9,
    "weights_float32": 1e-5,
    "weights_bfloat16": 5e-2,
    "grads_float32": 2e-4,
    "comm_float32": 2e-4,
    "comm_bfloat16_sums_wide": 5e-2,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      kind: One of `KINDS`.
      error: What differs most, relative to the largest element of a leaf.
      says: The refusal, or the name of what differs.
    """

    kind: str
    error: float
    says: str


def outcome_of(case: Composition) -> Outcome:
    """Runs a case here and there.

    A message of ours is a refusal; another exception is raised as it is.
    """
    with jax.enable_x64(True):
        return outcome_against(case, run_plainly(case))


def outcome_against(case: Composition, want: Ran) -> Outcome:
    """Runs a case on its mesh, in float64, and compares it with a run elsewhere."""
    try:
        got = run_sharded(case)
    except ValueError as refusal:
        return Outcome("refused", 0.0, str(refusal))
    return compare(case, got, want)


def compare(case: Composition, got: Ran, want: Ran) -> Outcome:
    """The largest difference of all results, in tolerances of each."""
    errors = {
        f.name: _difference(getattr(got, f.name), getattr(want, f.name))
        for f in dataclasses.fields(Ran)
    }
    name = max(errors, key=lambda name: errors[name] / _tolerance(case, name))
    kind = "agree" if errors[name] <= _tolerance(case, name) else "differ"
    return Outcome(kind, errors[name], "" if kind == "agree" else name)


def _tolerance(case: Composition, name: str) -> float:
    """The first loss has the same casts here and there, whatever the policy."""
    return TOLERANCES["none" if name == "first" else case.policy]


def _difference(got: Any, want: Any) -> float:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(got) != len(want):
        return math.inf
    return max(map(_error, got, want), default=0.0)


def _error(got: Any, want: Any) -> float:
    if jnp.issubdtype(getattr(got, "dtype", float), jax.dtypes.prng_key):
        return 0.0
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if got.shape != want.shape or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-3))
