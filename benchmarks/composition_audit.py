"""Models, plans and runs put together at random: compiled for GPUs, and audited.

    PYTHONPATH=tests python benchmarks/composition_audit.py [--cases 200]
    PYTHONPATH=tests python benchmarks/composition_audit.py --seeds 28 59

Each case is drawn by its number, as in `composition_fuzz.py`, widened so that XLA
shards what the plan does, and compiled for H200s without one. `audit_step` must find
that the program does what the plan says: a finding is a fault of the step, of the audit
or of XLA, and is printed with its seed. A case that is refused by a ValueError before
it is compiled counts as refused. A run goes on where the JSON beside it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import result
from composition.composed_loss import BUILDERS, rows_of
from composition.composed_models import Tools
from composition.composed_on_mesh import loss_on_mesh, plan_of
from composition.composed_optimizers import optimizer_of
from composition.composition_draw import case_of_seed
from composition.compositions import Composition

import fsdp_jax as fsdp

PACKAGES = ("jax", "flax", "optax", "equinox")
KINDS = ("as_planned", "refused", "findings")
WIDTH = 128
OVER_TP = {"up": -1, "down": -2}
"""As in Megatron. With one of these alone XLA gathers matrices: a true finding."""


def main() -> int:
    """Audits the cases that are not in the results yet."""
    options = _parse()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if options.seeds:
        return int(any([_say(seed, audited(seed)) for seed in options.seeds]))
    conditions = result.begin(options, PACKAGES)
    found = result.resumed(options, _empty())
    again = [int(seed) for seed in found["findings_of"]]
    found |= {"findings_of": {}, "findings": 0}
    for seed in (*again, *range(found["cases"], options.cases)):
        began = time.process_time()
        _add(found, seed, audited(seed))
        found["cpu_seconds"] += round(time.process_time() - began, 1)
        result.write(options, conditions, found, show=False)
        jax.clear_caches()
    print({name: found[name] for name in ("cases", "cpu_seconds", *KINDS)})
    return int(bool(found["findings"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Audits random compositions, compiled for GPUs."
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    result.add_arguments(parser)
    parser.set_defaults(out=result.RESULTS / "composition_audit.json")
    return parser.parse_args()


def audited(seed: int) -> tuple[str, list[str]]:
    """Returns which of `KINDS` a case is, and the lines that say why."""
    try:
        plan, compiled, microbatches = _compiled(_widened(case_of_seed(seed)))
    except ValueError as refusal:
        return "refused", [str(refusal)]
    try:
        fsdp.audit_step(plan, compiled, num_microbatches=microbatches)
    except fsdp.audit.AuditError as error:
        return "findings", str(error).splitlines()
    return "as_planned", []


def _widened(case: Composition) -> Composition:
    return dataclasses.replace(
        case,
        width=WIDTH,
        misuse="none",
        min_shard_elements=0,
        # A loop that gathers further ahead than its plan says is a finding.
        unit_prefetch=max(case.prefetch, case.unit_prefetch),
    )


def _compiled(case: Composition) -> tuple[fsdp.Plan, Any, int]:
    built = BUILDERS[case.framework](case, Tools(fsdp.unit, fsdp.scan), fsdp.Stacked)
    plan = plan_of(case, built, OVER_TP)
    found = fsdp.estimate_step(
        plan,
        loss_on_mesh(case, built),
        functools.partial(optimizer_of, case),
        jax.tree.map(jnp.asarray, rows_of(case)),
        mesh=case.axes,
        gpus=plan.mesh.size,
        guide=False,
        has_aux=case.aux and not case.returns_state,
        calculate_per_token_loss=case.per_token,
        num_microbatches=case.num_microbatches,
    )
    return found.plan, found.compiled, case.num_microbatches


def _empty() -> dict[str, Any]:
    zeros = dict.fromkeys(("cases", "cpu_seconds", *KINDS), 0)
    return {**zeros, "refusals": {}, "findings_of": {}}


def _add(found: dict[str, Any], seed: int, case: tuple[str, list[str]]) -> None:
    kind, lines = case
    found["cases"] = max(found["cases"], seed + 1)
    found[kind] += 1
    if kind == "refused":
        found["refusals"][str(seed)] = lines[0][:200]
    if kind == "findings":
        _say(seed, case)
        found["findings_of"][str(seed)] = [line[:300] for line in lines]


def _say(seed: int, case: tuple[str, Iterable[str]]) -> bool:
    kind, lines = case
    print(f"{seed}: {kind}", *lines, sep="\n  ", flush=True)
    return kind == "findings"


if __name__ == "__main__":
    raise SystemExit(main())
