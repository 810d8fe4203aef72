"""Checkpoints are found by paths of every form that a shell takes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fsdp_jax as fsdp

TX = optax.sgd(0.1)


def test_a_path_with_a_parent_in_it_is_saved_to_and_loaded_from(tmp_path, monkeypatch):
    def make(key):
        return {"w": jax.random.normal(key, (64, 64))}

    plan = fsdp.fully_shard(make, fsdp.make_mesh())
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "outer" / "inner")
    fsdp.save("../../link", state)
    with fsdp.Checkpointer("../../outer/../link") as checkpointer:
        checkpointer.save(1, dataclasses.replace(state, step=jnp.asarray(1)))
    assert fsdp.latest_step("../../run") == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"0", "1"}
    loaded = fsdp.load("../../link", fsdp.abstract_state(plan, TX), step=0)
    np.testing.assert_array_equal(loaded.params["w"], state.params["w"])
    assert (tmp_path / "link").is_symlink()
