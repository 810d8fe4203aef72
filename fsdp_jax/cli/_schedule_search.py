"""Searches schedules of a strategy: its own options, and some of XLA's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxlib.version import __version__

from fsdp_jax.cli._sharding_options import Strategy
from fsdp_jax.planner import Knob, Search, StepEstimate, search_schedules
from fsdp_jax.training._compiler_options import (
    Options,
    batch_parts_options,
    pipelining_modes,
    unmeasured_options,
)

_MIB = 1 << 20

KNOBS = (
    Knob("unroll", (1, 2, 4)),
    Knob("prefetch", (0, 1, 2)),
    Knob("batch_parts", (1, 2)),
    Knob("remat", ("nothing", "dots", "all")),
    Knob("reshard", (True, False)),
    Knob("xla_gpu_all_gather_combine_threshold_bytes", (128 * _MIB, 1024 * _MIB)),
    Knob("xla_gpu_reduce_scatter_combine_threshold_bytes", (32 * _MIB, 1024 * _MIB)),
    Knob("pipelining", (*pipelining_modes(),), measured=False, beside={"prefetch": 0}),
    Knob("symmetric_buffers", (True,), measured=False),
)
"""Settings to search, those that usually gain most first.

The last two are XLA's own pipelining of collectives over the iterations of a loop, in
place of units that are gathered ahead, and NCCL's symmetric buffers.
"""

_OF_XLA = "xla_gpu_"
_UNMEASURED = {"pipelining": None, "symmetric_buffers": False}


def search_strategy(
    estimate: Callable[[Strategy, Options], StepEstimate],
    strategy: Strategy,
    options: Options,
    seconds: float,
) -> Search:
    """Searches the schedules of a strategy.

    Args:
      estimate: Function that compiles the step of a strategy with these XLA options,
        and replays it.
      strategy: Strategy that was asked for.
      options: XLA options of its step.
      seconds: Budget.

    Returns:
      All that was tried, and the best.

    Raises:
      ValueError: If the strategy itself is not possible.
    """

    def estimate_of(settings: Mapping[str, Any]) -> StepEstimate:
        words = ", ".join(f"{name}={value}" for name, value in settings.items())
        print(f"fsdp-jax: compiling {words}", file=sys.stderr)
        try:
            return estimate(*with_settings(strategy, options, settings))
        except jax.errors.JaxRuntimeError as error:
            if "compile option" not in str(error):
                raise
            raise ValueError(f"XLA of jaxlib {__version__}: {error}") from error

    start = settings_of(strategy, options)
    return search_schedules(estimate_of, start, KNOBS, seconds=seconds)


def settings_of(strategy: Strategy, options: Options) -> dict[str, Any]:
    """Returns the settings that a search starts from.

    Args:
      strategy: Strategy that was asked for.
      options: XLA options of the step.
    """
    strategy = dataclasses.replace(
        strategy, remat=strategy.saved, prefetch=strategy.num_ahead
    )
    names = [knob.name for knob in KNOBS if knob.name not in _UNMEASURED]
    of_steps = {
        name: options[name] if name.startswith(_OF_XLA) else getattr(strategy, name)
        for name in names
    }
    return of_steps | _UNMEASURED


def with_settings(
    strategy: Strategy, options: Options, settings: Mapping[str, Any]
) -> tuple[Strategy, Options]:
    """Returns a strategy and XLA options with other settings.

    Args:
      strategy: Strategy that was asked for.
      options: XLA options of the step.
      settings: Settings by the names of `KNOBS`.
    """
    of_xla = {k: v for k, v in settings.items() if k.startswith(_OF_XLA)}
    rest = {k: v for k, v in settings.items() if k not in {*of_xla, *_UNMEASURED}}
    asked = {name: settings[name] for name in _UNMEASURED}
    changed = {**options, **of_xla, **unmeasured_options(__version__, **asked)}
    of_parts = batch_parts_options(strategy.batch_parts)
    strategy = dataclasses.replace(strategy, **rest)
    changed = {name: v for name, v in changed.items() if name not in of_parts}
    changed |= batch_parts_options(strategy.batch_parts)
    if not strategy.reshard:  # Layers that stay gathered have nothing else to choose.
        strategy = dataclasses.replace(strategy, prefetch=0, remat="all")
    return strategy, changed
