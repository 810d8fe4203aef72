"""A state on one GPU, saved beside training and loaded back, to the bit."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_decoder
import jax
import jax.numpy as jnp

import fsdp_jax as fsdp
from fsdp_jax.cli._decoder_loss import fused_next_token_loss


def measure_checkpoint(case: gpu_decoder.Case) -> dict[str, Any]:
    """Seconds of a save and of a load, and whether every leaf came back.

    Args:
      case: Step whose state is saved; four layers of it are enough to be timed.
    """
    layers = min(4, case.config.num_hidden_layers)
    config = dataclasses.replace(case.config, num_hidden_layers=layers)
    case = dataclasses.replace(case, config=config)
    plan, tx, tokens = case.plan(), gpu_decoder.optimizer(), case.batch()
    step = fsdp.make_train_step(plan, fused_next_token_loss, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(2):
        state, _ = step(state, tokens)
    leaves = jax.tree.leaves(state)
    size = sum(leaf.nbytes for leaf in leaves)
    kept = jax.tree.map(jnp.copy, state)  # The next step writes over the state.
    jax.block_until_ready(kept)
    with tempfile.TemporaryDirectory() as folder:
        with fsdp.Checkpointer(Path(folder, "run")) as checkpointer:
            started = time.perf_counter()
            checkpointer.save(2, state)
            blocked = time.perf_counter() - started
            state, _ = step(state, tokens)  # while it is written
        written = time.perf_counter() - started
        started = time.perf_counter()
        like = fsdp.abstract_state(plan, tx)
        loaded = jax.block_until_ready(fsdp.load(Path(folder, "run"), like))
        seconds = time.perf_counter() - started
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(loaded), strict=True)
    differ = sum(not bool(jnp.array_equal(a, b)) for a, b in pairs)
    resumed, _ = step(loaded, tokens)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True)
    moved = sum(not bool(jnp.array_equal(a, b)) for a, b in pairs)
    return {
        "bytes": size,
        "blocked_s": blocked,
        "written_s": written,
        "load_s": seconds,
        "leaves": len(leaves),
        "leaves_that_differ": differ,
        # The step after a load is the one that was taken while the save was written.
        "leaves_that_differ_a_step_later": moved,
    }
