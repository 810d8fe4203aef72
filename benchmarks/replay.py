"""Bits flipped in steps and between them: how many `ReplayCheck` finds and attributes.

    PYTHONPATH=tests python benchmarks/replay.py [--flips 1000] [--out FILE]
    PYTHONPATH=tests python benchmarks/replay.py --cost [--out FILE]

Each case is drawn by its number, on 8 simulated devices: a bit of a weight, of a moment
or of an updated weight on one device in a checked step; a value that no input shows,
added to an activation or to its gradient on one rank; a bit of any leaf on one device
between two steps. A case counts as `without_effect` if the step makes the same state
to the bit, `found` if the check raises, `attributed` if it names that device alone, and
`unattributed` if it names none. Steps without a fault are checked between them:
`false_alarms` are those that raise. A run goes on where the JSON beside it ends.
`--cost` measures what the check adds to a step of a larger model, replayed every 100
steps, on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import result
from helpers.faults import BACKWARD, FORWARD, with_faults
from helpers.flips import flip_bit

import fsdp_jax as fsdp
from fsdp_jax.replay import CorruptionError, ReplayCheck, ReplayStep

DEVICES, ROWS, CASES, TX = 8, 8, 1000, optax.adam(1e-3)
STORED = ("params.w", "params.v")
MOMENTS = tuple(f"opt_state.0.{m}.{n}" for m in ("mu", "nu") for n in "wv")
KINDS = ("weight", "moment", "update", "activation", "gradient", "between")
COUNTS = ("flips", "without_effect", "found", "attributed", "unattributed", "false")
_EMPTY = {
    "next": 0,
    "checked_without_fault": 0,
    "false_alarms": 0,
    "kinds": {kind: dict.fromkeys(COUNTS, 0) for kind in KINDS},
}


def main() -> None:
    """Plants flips, or measures the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cost", action="store_true", help="measure the cost instead")
    result.add_arguments(parser)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if args.flips > CASES:
        parser.error(f"--flips {args.flips}: there are {CASES} cases.")
    conditions = result.begin(args, ("jax", "optax"))
    if args.cost:
        result.write(args, conditions, cost())
        return
    found = result.resumed(args, _EMPTY) if args.out else dict(_EMPTY)
    while found["next"] < args.flips:
        plant(found, found["next"])
        found["next"] += 1
        if found["next"] % 6 == 0:
            result.write(args, conditions, found, show=False)
    result.write(args, conditions, found)


def make_model(key):
    """Returns two matrices."""
    w, v = jax.random.split(key)
    return {
        "w": jax.random.normal(w, (16, 16)) / 4,
        "v": jax.random.normal(v, (16, 8)) / 4,
    }


@functools.cache
def tables() -> np.ndarray:
    """Returns faults of activations and gradients, by case and row: none, and all."""
    found = np.zeros((2, CASES, ROWS, 2), np.float32)
    for case in range(CASES):
        kind, rank, rng = drawn(case)
        size = rng.choice((-1, 1)) * 2.0 ** rng.uniform(-12, 2)
        if kind in {"activation", "gradient"}:
            found[1, case, rank, FORWARD if kind == "activation" else BACKWARD] = size
    return found


def batch_of(case: int) -> dict[str, np.ndarray]:
    """Returns rows, a rank each, and the number of the case."""
    x = np.random.default_rng(case).normal(size=(ROWS, 16)).astype(np.float32)
    row = np.arange(ROWS, dtype=np.int32)
    return {"x": x, "row": row, "case": np.full_like(row, case)}


@functools.cache
def replay_step(by: int, *, is_wrong: bool = False) -> ReplayStep:
    """Returns the step on the mesh with its ranks exchanged, faulty within or not."""

    def loss_fn(model, batch):
        hidden = jnp.tanh(batch["x"] @ model["w"])
        hidden = with_faults(hidden, batch, tables(), int(is_wrong))
        return jnp.mean((hidden @ model["v"] - 1.0) ** 2)

    mesh = fsdp.make_mesh(devices=list(np.roll(jax.devices(), by)))
    plan = fsdp.fully_shard(make_model, mesh)
    return ReplayStep(fsdp.make_train_step(plan, loss_fn, TX), TX)


@functools.cache
def start() -> fsdp.TrainState:
    """Returns a state after three steps, with moments."""
    plan = replay_step(0).plan
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for number in range(3):
        state, _ = replay_step(0).step(state, batch_of(number))
    return state


def unchanged(state: Any) -> Any:
    """Returns the state."""
    return state


@dataclasses.dataclass(frozen=True)
class Flipped(ReplayStep):
    """A step whose state a fault changes where it is recorded.

    Attributes:
      before: Changes the state that it reads.
      after: Changes the state that it writes.
    """

    before: Callable[[Any], Any] = unchanged
    after: Callable[[Any], Any] = unchanged

    def recorded(self, state, batch):
        """Runs the step with the fault."""
        new, metrics, events = replay_step(0).recorded(self.before(state), batch)
        return self.after(new), metrics, events


@jax.jit
def copied(state: fsdp.TrainState) -> fsdp.TrainState:
    """Returns a copy, which a step may donate."""
    return jax.tree.map(jnp.copy, state)


def drawn(case: int) -> tuple[str, int, random.Random]:
    """Returns the kind of a case, its rank, and the source of what else is drawn."""
    rng = random.Random(case)
    return KINDS[case % len(KINDS)], rng.randrange(DEVICES), rng


def draw(case: int) -> tuple[str, int, ReplayStep, Callable[[Any], Any]]:
    """Returns the kind of a case, its device, its step, and the flip between steps."""
    kind, rank, rng = drawn(case)
    names = {"moment": MOMENTS, "between": (*STORED, *MOMENTS)}.get(kind, STORED)
    flip = functools.partial(
        flip_bit,
        leaf=rng.choice(names),
        device=jax.devices()[rank],
        bit=rng.randrange(32),
        element=rng.randrange(16),
    )
    if kind in {"activation", "gradient"}:
        return kind, rank, replay_step(0, is_wrong=True), flip
    faults = {"after": flip} if kind == "update" else {"before": flip}
    return kind, rank, Flipped(replay_step(0).step, TX, **faults), flip


def plant(found: dict[str, Any], case: int) -> None:
    """Plants one fault, and counts what comes of it."""
    kind, rank, step, flip = draw(case)
    counts = found["kinds"][kind]
    counts["flips"] += 1
    others = [replay_step(1), replay_step(2)]
    if kind == "between":
        report = report_of(
            ReplayCheck(replay_step(0), others, every=0), case, then=flip
        )
        has_effect = True
    else:
        check = ReplayCheck(step, others, every=1)
        report = report_of(check, case)
        made, right = (
            fsdp.replay.state_digest(each.recorded(copied(start()), batch_of(case))[0])
            for each in (step, replay_step(0))
        )
        has_effect = made != right
    counts["without_effect"] += not has_effect
    counts["found"] += has_effect and report is not None
    if report is not None:
        named = report.devices == (jax.devices()[rank],)
        counts["attributed"] += named
        counts["unattributed"] += not report.devices
        counts["false"] += bool(report.devices) and not named
    if case % 10 == 0:
        found["checked_without_fault"] += 1
        check = ReplayCheck(replay_step(0), others, every=1)
        found["false_alarms"] += report_of(check, case) is not None


def report_of(
    check: ReplayCheck, case: int, then: Callable[[Any], Any] | None = None
) -> fsdp.replay.CorruptionReport | None:
    """Runs a checked step, or two with a flip in between; returns the report."""
    try:
        state, _ = check(copied(start()), batch_of(case))
        if then is not None:
            check(then(state), batch_of(case))
    except CorruptionError as error:
        return error.report
    return None


def cost(
    steps: int = 8, every: int = 100, embed: int = 1024, rows: int = 16_384
) -> dict[str, Any]:
    """Returns seconds of a step: plain, watched between steps, and replayed.

    Interleaved, so that all three meet the same machine.

    Args:
      steps: Steps of each, after one that compiles.
      every: Interval of replays that the cost is stated for.
      embed: Width of the eight layers.
      rows: Rows of a step; 2,048 tokens a device are few for training.
    """

    def make(key):
        return {"layers": {"w": jax.random.normal(key, (8, embed, embed)) / embed**0.5}}

    def layer(w, x):
        return jnp.tanh(x @ w["w"]), None

    def loss(model, batch):
        return jnp.mean(fsdp.scan(layer, model["layers"], batch)[0] ** 2), {}

    def made(by):
        mesh = fsdp.make_mesh(devices=list(np.roll(jax.devices(), by)))
        plan = fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")])
        return ReplayStep(fsdp.make_train_step(plan, loss, TX, has_aux=True), TX)

    batch = np.ones((rows, embed), np.float32)
    plain, others = made(0), [made(1), made(2)]
    runs = {
        "plain": plain.step,
        "watched": ReplayCheck(plain, others, every=0),
        "replayed": ReplayCheck(plain, others, every=1),
    }
    states = {}
    for name in runs:  # Arrays of its own for each: steps donate them.
        params = fsdp.init_params(plain.plan, jax.random.key(0))
        states[name] = fsdp.init_state(plain.plan, TX, params)
    times = {name: [] for name in runs}
    for _ in range(steps + 1):
        for name, step in runs.items():
            began = time.perf_counter()
            states[name], metrics = step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            times[name].append(time.perf_counter() - began)
    secs = {name: float(np.median(taken[1:])) for name, taken in times.items()}
    watching = secs["watched"] / secs["plain"] - 1
    replaying = (secs["replayed"] - secs["watched"]) / secs["plain"] / every
    return {
        "every": every,
        "model": {"embed": embed, "layers": 8, "rows": rows},
        "secs": secs,
        "of_step": {"watching": watching, "replaying": replaying},
    }


if __name__ == "__main__":
    main()
