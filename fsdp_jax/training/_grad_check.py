"""Reports on non-finite or unusually large gradients, by parameter and step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdp_jax._report import text_table
from fsdp_jax.sharding._plan import Plan


def largest_grads(plan: Plan, grad_peaks: Any, num: int = 10) -> str:
    """Returns a table of the parameters whose gradients have the largest elements.

    Args:
      plan: Plan from `fully_shard`.
      grad_peaks: `metrics["grad_peaks"]` of a step, shape `[trainable]`.
      num: Number of parameters to show.

    Returns:
      One line per parameter, largest first; non-finite gradients precede all others.
    """
    peaks = _by_name(plan, grad_peaks)
    shown = sorted(peaks.items(), key=lambda item: -item[1])[:num]
    median = float(np.median(list(peaks.values())))
    rows = [
        (
            name,
            f"{peak:.3e}" if math.isfinite(peak) else "not finite",
            f"{peak / median:,.1f} x" if median and math.isfinite(peak) else "",
        )
        for name, peak in shown
    ]
    columns = {"parameter": "left", "largest": "right", "of the median": "right"}
    return text_table(columns, rows)


def raise_if_not_finite(plan: Plan, grad_peaks: Any, step: int) -> None:
    """Raises a `FloatingPointError` that names the parameters and the step.

    Args:
      plan: Plan from `fully_shard`.
      grad_peaks: `metrics["grad_peaks"]` of the step, shape `[trainable]`. It is
        reduced over all ranks within the step, so that either every host raises or none
        does.
      step: Number of the step, counted from 1.
    """
    peaks = _by_name(plan, grad_peaks)
    bad = [name for name, peak in peaks.items() if not math.isfinite(peak)]
    if bad:
        more = f" and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise FloatingPointError(
            f"Step {step}: {len(bad)} of {len(peaks)} gradients are not finite: "
            f"{', '.join(bad[:20])}{more}. The state has been updated with them: go on "
            "from the last checkpoint, with a smaller learning rate or without this "
            "batch, or pass on_nonfinite='skip' to leave such steps out."
        )


def _by_name(plan: Plan, grad_peaks: Any) -> dict[str, float]:
    names = [param.name for param in plan.param_plans if not param.is_frozen]
    return dict(zip(names, np.asarray(grad_peaks).tolist(), strict=True))
