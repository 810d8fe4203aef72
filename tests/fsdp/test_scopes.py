"""Names in a trace are read back as they were written, within scopes of jax as well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers.errors import facts

from bridge.models import _flash_kernel, _fused_attention, _grouped
from fsdp_jax import _scopes as scopes
from fsdp_jax.ops.attention import _common


def paths(fn, *args):
    """Path of scopes of each equation of a function."""
    return [
        str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns
    ]


def in_unit(x):
    with scopes.unit_scope("layers.0"), jax.named_scope(scopes.PREFETCH):
        return jnp.sin(x) * x


def test_a_unit_is_found_in_forward_and_backward():
    found = paths(jax.grad(in_unit), 1.0)
    inside = [path for path in found if scopes.unit_of(path)]
    assert {scopes.unit_of(path) for path in inside} == {"layers.0"}
    assert {scopes.is_transposed(path) for path in inside} == {True, False}
    assert all(scopes.is_in(path, scopes.PREFETCH) for path in inside)


def test_what_is_recomputed_is_known_as_such():
    lowered = jax.jit(jax.grad(jax.checkpoint(in_unit))).lower(1.0)
    found = lowered.as_text(debug_info=True).splitlines()
    assert any(scopes.is_recomputed(line) for line in found)
    assert not any(map(scopes.is_recomputed, paths(in_unit, 1.0)))


def test_units_are_in_order_from_the_outermost():
    path = "jit(step)/jvp(unit:layers)/while/body/unit:layers.mlp/dot_general"
    assert scopes.units_in(path) == ["layers", "layers.mlp"]
    assert scopes.unit_of(path) == "layers.mlp"
    assert scopes.unit_of("jit(step)/mul") is None


def test_a_name_is_a_part_of_the_path_and_not_of_a_word():
    assert scopes.is_in("jit(step)/jvp(optimizer)/add", scopes.OPTIMIZER)
    assert not scopes.is_in("jit(step)/my_optimizer_loss/add", scopes.OPTIMIZER)


def test_names_that_bridge_writes_are_those_that_are_read():
    kernels = (
        _flash_kernel.FORWARD,
        _flash_kernel.QUERY_GRAD,
        _flash_kernel.KEY_GRADS,
    )
    read = (scopes.FLASH_FORWARD, scopes.FLASH_QUERY_GRAD, scopes.FLASH_KEY_GRADS)
    assert kernels == read
    assert _fused_attention.RESIDUALS == _common.RESIDUALS


def test_the_rows_of_experts_are_read_as_both_packages_write_them():
    written = _grouped._Rounds(10, 10, None).scope(600, 64)
    assert written == scopes.rows_of_experts(600, 640)
    path = f"jit(step)/{written}/dot_general"
    assert scopes.part_of_rows(path) == 600 / 640
    assert scopes.part_of_rows("jit(step)/dot_general") == 1
    assert scopes.part_of_rows(scopes.rows_of_experts(700, 640)) == 1


def test_the_turns_of_a_stage_are_read_as_written():
    def stage(x):
        with scopes.turns_scope(2, 7):
            return jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)

    *_, path = paths(stage, 1.0)
    assert scopes.turns_of(f"jit(step)/{path}/cond") == (2, 7)
    assert scopes.turns_of(path) is None


def test_a_function_that_traces_are_searched_for_keeps_its_name():
    def fsdp_collect():
        pass

    with pytest.raises(RuntimeError, match=facts("fsdp_collect", "fsdp_gather")):
        scopes.traced_as(scopes.FSDP_GATHER)(fsdp_collect)
