"""Models that others wrote: how much of a step waits, and what it needs.

    python benchmarks/foreign.py [--gpus 8 64] [--layers 4] [--models llama3 ...]

The models of `foreign_models`, compiled for H200s without one (`fsdp.estimate_step`):
with gathers one unit ahead (`FSDPConfig(prefetch=1)`, the default), in the order that
XLA chooses (`prefetch=0`), in that order with collectives that XLA merges up to fixed
sizes in the place of the largest unit's (`fixed`), and by annotations alone, which is
jax.jit with the plan's shardings as those of the parameters and nothing of ours in the
step. The first three recompute a unit's activations; annotations recompute what the
model says, which is mostly nothing, and are to be compared with `saved`, which gathers
one unit ahead and recomputes nothing. Beside them is the reference decoder, of which
`fsdp.scan` runs the layers.

Each row is written to `--out` once it is measured, with its commit; rows that are there
already are kept. With `--predict` nothing is compiled: the memory of the rows that are
there is predicted anew, which takes a trace of each step. With `--compile-times` what
is measured is the processor time to trace and compile a step, of both orders in turn.

While a collective runs, the cost model slows kernels down, so that communication that
is hidden still takes time. `faster_at_most` is what a step would gain that hid the rest
of its communication too: no order of the same collectives and kernels gains more.
`floor_ms` is a step whose collectives are free, `waits` lists what a step waits for.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import result
from foreign_models import FORMS, SEQ, WIDTH, Form

import fsdp_jax as fsdp
from fsdp_jax.audit._expected import expected_collectives
from fsdp_jax.audit._unsharded_units import unsharded
from fsdp_jax.hlo._program import communicated_arrays, program_of
from fsdp_jax.planner import GPUS
from fsdp_jax.planner._compile import compile_scheduled, gpu_devices
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.planner._timeline import Timeline
from fsdp_jax.training._compiler_options import compiler_options, options_of
from fsdp_jax.training._memory_check import compiled_bytes

TX = optax.adamw(3e-4)
REFERENCE = "reference"
SAVED, FIXED = "saved", "fixed"
ORDERS = ("prefetch=1", "prefetch=0", "annotations", SAVED, FIXED)
FIXED_SIZES = {
    "xla_gpu_all_gather_combine_threshold_bytes": 2**30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,
}
"""What all plans told XLA before each told it the bytes of its largest unit."""
PACKAGES = ("jax", "flax", "equinox", "google-tunix", "equimo")
# The bars of the comparison: shares of a step, and units of memory.
SHARE, ENOUGH, UNITS_MORE = 1.3, 0.02, 2
SMALL = 0.01
"""Part of a step from which a wait is listed."""


def planned(form: Form, gpus: int, order: str) -> fsdp.Plan:
    policies = jax.checkpoint_policies
    config = fsdp.FSDPConfig(
        prefetch=int(order not in ("prefetch=0", FIXED)),
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16),
        remat_policy=None if order == SAVED else policies.nothing_saveable,
    )
    mesh = fsdp.make_mesh(devices=gpu_devices(GPUS["h200"], gpus))
    return fsdp.fully_shard(form.make_model, mesh, units=form.units, config=config)


def estimated(form: Form, gpus: int, order: str) -> dict[str, Any]:
    plan = planned(form, gpus, order)
    options = compiler_options(plan=plan)
    options |= FIXED_SIZES if order == FIXED else {}
    found = fsdp.estimate_step(
        plan, form.loss, TX, form.batch(gpus), gpu="h200", options=options
    )
    program = program_of(found.compiled, found.plan.mesh)
    arrays = list(communicated_arrays(program, found.plan.mesh))
    expected = expected_collectives(found.plan)
    return {
        **times(found.timeline),
        "floor_ms": round(1e3 * found.floor_seconds, 2),
        "waits": waits(found.timeline),
        "compiled_gb": round(found.compiled_bytes / 1e9, 3),
        "predicted_gb": round(found.memory.total / 1e9, 3),
        "largest_unit_gb": round(largest_unit_bytes(found.plan) / 1e9, 3),
        "units_unsharded": unsharded(program, arrays, expected).units,
        "guided": found.guided,
    }


def times(timeline: Timeline) -> dict[str, float]:
    return {
        "step_ms": round(1e3 * timeline.seconds, 2),
        "exposed_of_step": round(timeline.exposed_seconds / timeline.seconds, 4),
    }


def waits(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns the collectives for which a hundredth of the step waits, and when."""
    return [
        {
            "op": sent.collective.op,
            "unit": sent.collective.unit,
            "begins_at": round(sent.start / timeline.seconds, 3),
            "exposed_of_step": round(sent.exposed / timeline.seconds, 4),
        }
        for sent in timeline.sent
        if sent.exposed > SMALL * timeline.seconds
    ]


def hidden_ms(row: dict[str, Any]) -> float:
    """Returns the milliseconds of a step if what it exposes ran beside its kernels."""
    unslowed = 1 - GPUS["h200"].cost.overlap_slowdown
    return row["step_ms"] * (1 - unslowed * row["exposed_of_step"])


def predicted_gb(form: Form, gpus: int, order: str) -> float:
    plan = planned(form, gpus, order)
    step = fsdp.make_train_step(plan, form.loss, TX)
    state, batch = fsdp.abstract_state(plan, TX), form.batch(gpus)
    traced = step.jitted.trace(state, batch).jaxpr
    return round(predict_memory(plan, state, batch, traced).total / 1e9, 3)


def largest_unit_bytes(plan: fsdp.Plan) -> int:
    """Returns the bytes of the largest unit's unsharded weights, in bfloat16."""
    sizes: dict[str, int] = {}
    for param in plan.param_plans:
        elements = 1
        for size in param.shape[param.num_stacked :]:
            elements *= size
        sizes[param.unit] = sizes.get(param.unit, 0) + 2 * elements
    return max(size for unit, size in sizes.items() if unit in plan.units)


def annotated(form: Form, gpus: int) -> dict[str, Any]:
    """Compiles the step that `jax.jit` makes of the plan's shardings alone."""
    plan = planned(form, gpus, "prefetch=0")

    def cast(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    def loss(params, rest, batch):
        return form.loss(plan.model.merge(jax.tree.map(cast, params), rest), batch)

    def step(params, opt_state, rest, batch):
        grads = jax.grad(loss)(params, rest, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = plan.params
    opt_state = jax.eval_shape(TX.init, params)
    opt_state = optax.tree_utils.tree_map_params(
        TX, lambda leaf, like: like, opt_state, params
    )
    batch = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        form.batch(gpus),
        plan.batch_shardings(form.batch(gpus)),
    )
    outs = jax.tree.map(lambda x: getattr(x, "sharding", None), (params, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=outs)
    lowered = jitted.lower(params, opt_state, plan.model_state, batch)
    cost = GPUS["h200"].cost
    found = compile_scheduled(lowered, cost, gpus, options_of(plan.mesh))
    return {
        **times(found.timeline),
        "compiled_gb": round(compiled_bytes(found.compiled) / 1e9, 3),
        "guided": found.guided,
    }


def processor_seconds() -> float:
    """Returns the processor time of this process and of those that it has run."""
    return sum(os.times()[:4])


def compiling(form: Form, gpus: int, order: str) -> float:
    """Returns the processor seconds to trace and compile a step, with no cache."""
    plan = planned(form, gpus, order)
    jax.clear_caches()
    started = processor_seconds()
    step = fsdp.make_train_step(plan, form.loss, TX, compiler_options={})
    lowered = step.lower(fsdp.abstract_state(plan, TX), form.batch(gpus))
    options = compiler_options(plan=plan)
    lowered.compile(compiler_options=options)
    return processor_seconds() - started


def compile_times(name: str, layers: int, gpus: int) -> dict[str, Any]:
    form = FORMS[name](layers)
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS[:2]}
    # In the order 1 0 0 1, so that neither order of units gains by its place.
    for order in (*ORDERS[:2], *ORDERS[1::-1]):
        seconds[order].append(compiling(form, gpus, order))
    ahead, without = (sum(seconds[order]) / 2 for order in ORDERS[:2])
    return {
        "model": name,
        "gpus": gpus,
        "prefetch_1_cpu_s": round(ahead, 1),
        "prefetch_0_cpu_s": round(without, 1),
        "times_as_long": round(ahead / without, 3),
    }


def measure(name: str, layers: int, gpus: int, order: str) -> dict[str, Any]:
    form = FORMS[name](layers)
    if order == "annotations":
        found = annotated(form, gpus)
    else:
        found = estimated(form, gpus, order)
    return {"model": name, "gpus": gpus, "order": order, **found}


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Says of each model, as it is by default, whether it reaches the bars."""
    by_key = {(row["model"], row["gpus"], row["order"]): row for row in rows}
    found = []
    for (name, gpus, order), row in by_key.items():
        reference = by_key.get((REFERENCE, gpus, ORDERS[0]))
        without = by_key.get((name, gpus, "prefetch=0"))
        if order != ORDERS[0] or name == REFERENCE or not (reference and without):
            continue
        share = max(SHARE * reference["exposed_of_step"], ENOUGH)
        faster = without["step_ms"] / row["step_ms"]
        at_most = without["step_ms"] / hidden_ms(row)
        more = row["compiled_gb"] - without["compiled_gb"]
        alone = by_key.get((name, gpus, "annotations"))
        saved = by_key.get((name, gpus, SAVED))
        fixed = by_key.get((name, gpus, FIXED))
        found.append(
            {
                "model": name,
                "gpus": gpus,
                "exposed_allowed": round(share, 4),
                "hides_enough": row["exposed_of_step"] <= share,
                "exposed_without": without["exposed_of_step"],
                "faster_than_without": round(faster, 4),
                "faster_at_most": round(at_most, 4),
                "gb_more_than_without": round(more, 3),
                "needs_little_more": more <= UNITS_MORE * row["largest_unit_gb"],
                "predicted_of_compiled": round(
                    row["predicted_gb"] / row["compiled_gb"], 3
                ),
                **(against_annotations(row, alone) if alone else {}),
                **(saved_against(saved, alone) if alone and saved else {}),
                **(against_fixed(row, fixed) if fixed else {}),
            }
        )
    return found


def against_annotations(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    return {
        "exposed_of_annotations": alone["exposed_of_step"],
        "faster_than_annotations": round(alone["step_ms"] / row["step_ms"], 4),
        "gb_of_annotations": alone["compiled_gb"],
    }


def saved_against(saved: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    return {
        "saved_faster_than_annotations": round(alone["step_ms"] / saved["step_ms"], 4),
        "gb_saved": saved["compiled_gb"],
    }


def against_fixed(row: dict[str, Any], fixed: dict[str, Any]) -> dict[str, float]:
    return {
        "exposed_of_fixed": fixed["exposed_of_step"],
        "faster_than_fixed": round(fixed["step_ms"] / row["step_ms"], 4),
        "gb_of_fixed": fixed["compiled_gb"],
    }


def predict_again(
    rows: Sequence[dict[str, Any]], args: argparse.Namespace, commit: str | None
) -> Iterator[dict[str, Any]]:
    """Yields the rows, those asked for with their memory as it is predicted now."""
    for row in rows:
        wanted = row["model"] in args.models and row["order"] in args.orders
        if wanted and row["gpus"] in args.gpus and "predicted_gb" in row:
            form = FORMS[row["model"]](args.layers)
            size = predicted_gb(form, row["gpus"], row["order"])
            row = row | {"predicted_gb": size, "predicted_by": commit}
        yield row


def measure_rows(
    found: dict[str, Any], args: argparse.Namespace, commit: str | None
) -> Iterator[dict[str, Any]]:
    """Yields what was found, after each row that was not there."""
    rows = found["rows"]
    done = {(row["model"], row["gpus"], row["order"]) for row in rows}
    for gpus, name, order in itertools.product(args.gpus, args.models, args.orders):
        if (name, gpus, order) not in done:
            row = measure(name, args.layers, gpus, order)
            rows.append(row | {"commit": commit})
            yield found | {"compared": compared(rows)}


def time_compilers(
    found: dict[str, Any], args: argparse.Namespace, commit: str | None
) -> Iterator[dict[str, Any]]:
    """Yields what was found, after the times of each model that has none."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = found.setdefault("compile_times", [])
    done = {(row["model"], row["gpus"]) for row in rows}
    for gpus, name in itertools.product(args.gpus, args.models):
        if (name, gpus) not in done:
            row = compile_times(name, args.layers, gpus)
            rows.append(row | {"commit": commit})
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=[*ORDERS])
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    parser.add_argument("--compile-times", action="store_true", help="measure these")
    result.add_arguments(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    conditions = result.begin(args, PACKAGES)
    sizes = {"layers": args.layers, "width": WIDTH, "seq": SEQ, "rows": []}
    found = result.resumed(args, sizes) if args.out else sizes
    if args.predict:
        rows = list(predict_again(found["rows"], args, conditions.commit))
        found = found | {"rows": rows, "compared": compared(rows)}
    else:
        go_on = time_compilers if args.compile_times else measure_rows
        states = go_on(found, args, conditions.commit)
        for found in states:
            result.write(args, conditions, found, show=False)
    result.write(args, conditions, found)


if __name__ == "__main__":
    main()
