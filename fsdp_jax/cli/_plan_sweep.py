"""The sweep of `fsdp-jax plan`: other meshes and strategies for the same batch."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bridge.models import DecoderConfig, tensor_parallel_rules
from fsdp_jax.cli._context_parallel import check_context, check_rows
from fsdp_jax.cli._step_spec import Sizes, StepSpec
from fsdp_jax.cli._user_model import UserModel
from fsdp_jax.planner import GPU, StepEstimate, Sweep

_LONG_ROWS = 8192
"""Tokens from which on a sweep tries to split rows."""


class _Candidate(NamedTuple):
    name: str
    step: StepSpec
    sizes: Sizes


def sweep_meshes(step: StepSpec, gpu: GPU) -> Sweep:
    """Estimates a step on other meshes and with other strategies.

    Candidates whose ranks do not divide the batch are skipped, with a line on stderr.
    Where one does not fit, it is tried with nothing saved for backward too, unless the
    step says what is.

    Args:
      step: Step to estimate. Its rows and microbatches are those of all candidates.
      gpu: GPU to compile for.

    Raises:
      ValueError: If no candidate divides the batch.
    """
    rows = _rows_of(step)
    if not isinstance(step.model, UserModel):
        step = dataclasses.replace(step, rows=rows)
    found: dict[str, StepEstimate] = {}
    for name, changed, sizes in _candidates(step, gpu):
        ranks = step.gpus // (sizes.get("cp", 1) * sizes.get("tp", 1))
        if rows % (ranks * step.microbatches):
            # Rows that are fewer than ranks, as long ones are, cp or tp can share.
            print(
                f"fsdp-jax: skipping {name}: {rows} rows do not divide "
                f"over {ranks} ranks x {step.microbatches} microbatch(es)",
                file=sys.stderr,
            )
            continue
        for label, tried in _by_what_is_saved(name, changed):
            print(f"fsdp-jax: compiling {label}", file=sys.stderr)
            found[label] = tried.estimate(gpu, sizes, guide=False)
            if found[label].fits:
                break
    if not found:
        raise ValueError(
            f"--batch {rows}: the ranks of no mesh divide {rows} rows. Use a "
            f"multiple of {step.microbatches}, or more rows."
        )
    return Sweep(found)


def _by_what_is_saved(name: str, step: StepSpec) -> Iterator[tuple[str, StepSpec]]:
    """Yields a step, and what to try where it does not fit: less saved for backward."""
    yield name, step
    if step.strategy.remat is None and step.strategy.reshard:
        strategy = dataclasses.replace(step.strategy, remat="nothing")
        yield f"{name}, --remat nothing", dataclasses.replace(step, strategy=strategy)


def _rows_of(step: StepSpec) -> int:
    """Returns the rows of the batch that all candidates share."""
    if isinstance(step.model, UserModel):
        return step.model.rows
    return step.gpus * step.microbatches if step.rows is None else step.rows


def _candidates(step: StepSpec, gpu: GPU) -> Iterator[_Candidate]:
    """Yields the meshes and strategies that a sweep compares."""
    nodes = step.gpus // gpu.cost.devices_per_node
    flat = [("FSDP (ZeRO-3)", {"zero": 3}, {}), ("ZeRO-2", {"zero": 2}, {})]
    flat.append(("ZeRO-1", {"zero": 1}, {}))
    by_node = {"dp_outer": nodes}
    if nodes > 1:
        flat.append(("HSDP, a replica a node", {"zero": 3}, by_node))
        flat.append(("HFSDP, a replica a node", {"zero": 3, "outer": 1}, by_node))
    if not isinstance(step.model, UserModel):
        flat += _decoder_candidates(step, step.model, gpu)
    for name, changes, sizes in flat:
        # pp cancels: it divides the ranks and multiplies the microbatches.
        rounds = step.microbatches * sizes.get("pp", 1)
        strategy = dataclasses.replace(step.strategy, **changes)
        changed = dataclasses.replace(step, strategy=strategy, microbatches=rounds)
        yield _Candidate(name, changed, sizes)


def _decoder_candidates(step: StepSpec, config: DecoderConfig, gpu: GPU):
    """Returns the candidates that split a decoder over tp, cp, ep or pp."""
    flat: list[tuple[str, dict[str, int], dict[str, int]]] = []
    for tp in _tp_sizes(step, config, gpu):
        flat.append((f"FSDP, tp={tp}", {"zero": 3}, {"tp": tp}))
    for cp in _cp_sizes(step, config, gpu):
        flat.append((f"FSDP, cp={cp}", {"zero": 3}, {"cp": cp}))
    ep = _ep_size(step, config, gpu)
    if ep > 1:
        flat.append((f"FSDP, ep={ep}", {"zero": 3}, {"ep": ep}))
    pp = max(step.gpus // gpu.cost.devices_per_node, 2)
    if step.gpus % pp == 0 and _fills_stages(config, pp):
        # Of the same batch the ranks that are left take more rows, one at a time.
        flat.append((f"ZeRO-2, pp={pp}", {"zero": 2}, {"pp": pp}))
    return flat


def _tp_sizes(step: StepSpec, config: DecoderConfig, gpu: GPU) -> list[int]:
    """Returns the tp sizes to try: 2 and a node, where they split the matrices."""
    in_node = min(gpu.cost.devices_per_node, step.gpus)
    sizes = []
    for tp in sorted({2, in_node}):
        try:
            check_rows(step.seq, tp)
            tensor_parallel_rules(config, tp)
        except ValueError as error:
            print(f"fsdp-jax: skipping tp={tp}: {error}", file=sys.stderr)
        else:
            sizes += [tp] if step.gpus % tp == 0 else []
    return sizes


def _cp_sizes(step: StepSpec, config: DecoderConfig, gpu: GPU) -> list[int]:
    """Returns the cp sizes to try: 2 and a node, where rows are long and divide."""
    if step.seq < _LONG_ROWS:
        return []
    in_node = min(gpu.cost.devices_per_node, step.gpus)
    sizes = []
    for cp in sorted({2, in_node} - {1}):
        try:
            check_rows(step.seq, 1, cp)
            check_context(config, cp, 1, step.strategy.cp_algorithm)
        except ValueError as error:
            print(f"fsdp-jax: skipping cp={cp}: {error}", file=sys.stderr)
        else:
            sizes += [cp] if step.gpus % cp == 0 else []
    return sizes


def _fills_stages(config: DecoderConfig, pp: int) -> bool:
    """Returns whether there is a period of layers for each stage."""
    longest = max(config.layer_blocks, key=lambda block: block.stop - block.start)
    return longest.num_periods >= pp


def _ep_size(step: StepSpec, config: DecoderConfig, gpu: GPU) -> int:
    """Returns the largest ep size in a node that divides the experts; 1 for none."""
    experts = config.moe.num_experts if config.moe else 1
    return math.gcd(experts, min(gpu.cost.devices_per_node, step.gpus))
