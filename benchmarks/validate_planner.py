"""Predicts published training steps, and says how far off the planner is.

    python benchmarks/validate_planner.py build [--only TEXT] [--minutes 40]
    python benchmarks/validate_planner.py fit
    python benchmarks/validate_planner.py report [--out FILE] [--picture FILE]

`build` compiles the step of each row of `published_steps.csv` for its GPUs, with none
at hand, and keeps its schedule in `benchmarks/schedules`; rows that are there already
are left as they are. `fit` moves the few constants of `FITTED` to match the rows of the
sources marked "fit", and prints them. `report` replays the schedules of all rows on the
GPUs of `fsdp_jax.planner.GPUS` and writes the errors; it compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import jax
import result
from published_errors import REPORTED, compared, fitted, report
from published_models import Program
from published_outliers import far_off, gather_over_nodes
from published_picture import draw
from published_rows import (
    INDEX,
    SCHEDULES,
    program_of,
    read_index,
    read_rows,
    reason_not_built,
)

from fsdp_jax.planner._compile import compile_scheduled
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._kernel import workspace_bytes
from fsdp_jax.planner._schedule import kernels_of
from fsdp_jax.planner._schedule_file import save_schedule
from fsdp_jax.training._compiler_options import options_of
from fsdp_jax.training._memory_check import compiled_bytes


def build_program(program: Program) -> dict:
    """Compiles one program and keeps its schedule; returns its entry of the index."""
    started = time.process_time()
    plan, lowered = program.lower()
    cost = GPUS[program.gpu].cost
    found = compile_scheduled(lowered, cost, program.gpus, options_of(plan.mesh))
    save_schedule(found.schedule, SCHEDULES / f"{program.name}.json.gz")
    workspace = workspace_bytes(kernels_of(found.schedule))
    return {
        "gpus": program.gpus,
        "memory": compiled_bytes(found.compiled) + workspace,
        "guided": found.guided,
        "jax": jax.__version__,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def build(only: str, minutes: float) -> None:
    """Compiles the programs that have no schedule yet, until the time is used up."""
    jax.config.update("jax_platforms", "cpu")
    SCHEDULES.mkdir(exist_ok=True)
    programs = dict.fromkeys(
        program_of(row) for row in read_rows() if not reason_not_built(row)
    )
    started = time.process_time()
    for program in programs:
        if only not in program.name or program.name in read_index():
            continue
        if time.process_time() - started > 60 * minutes:
            print("The time is used up: run it again to go on.", file=sys.stderr)
            return
        entry = build_program(program)
        index = dict(sorted((read_index() | {program.name: entry}).items()))
        INDEX.write_text(json.dumps(index, indent=1) + "\n")
        print(program.name, entry, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts published training steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile rows without a schedule")
    building.add_argument("--only", default="", help="programs with this in their name")
    building.add_argument("--minutes", type=float, default=40, help="CPU time to use")
    commands.add_parser("fit", help="print constants that match the rows for the fit")
    reporting = commands.add_parser("report", help="write the errors of all rows")
    reporting.add_argument("--picture", help="SVG to draw the errors in")
    result.add_arguments(reporting)
    args = parser.parse_args()
    if args.command == "build":
        build(args.only, args.minutes)
    elif args.command == "fit":
        print(json.dumps(fitted(), indent=1))
    else:
        conditions = result.begin(args, REPORTED)
        rows = compared()
        found = report(rows) | {
            "far_off": far_off(rows),
            "all_gather_over_nodes": gather_over_nodes(),
        }
        result.write(args, conditions, found)
        if args.picture:
            draw(rows, args.picture)


if __name__ == "__main__":
    main()
