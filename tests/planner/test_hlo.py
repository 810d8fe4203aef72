"""The text of compiled modules is read as it is meant."""

from __future__ import annotations

import jax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.hlo._collectives import axes_of, collective_of, groups_along
from fsdp_jax.hlo._concatenated import parts_of
from fsdp_jax.hlo._parse import Shape, parse
from fsdp_jax.hlo._program import communicated_arrays, program_of
from fsdp_jax.hlo._walk import walk

pytestmark = pytest.mark.versions

MODULE = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %i = s32[] get-tuple-element(%state), index=0
  %ar = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%i, %ar)
}

%cond (state.1: (s32[], f32[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p0: f32[8,4], p1: bf16[2,6]) -> (s32[], /*index=1*/f32[8,4]) {
  %p0 = f32[8,4]{1,0} parameter(0), metadata={op_name="state.params['w']"}
  %p1 = bf16[2,6]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (bf16[2,6]{1,0}, bf16[8,6]{1,0}) all-gather-start(%p1), \
replica_groups=[1,4]<=[4], dimensions={0}, \
metadata={op_name="jit(step)/jvp(unit:layers.mlp)/all_gather calls=%nothing"}
  %tuple = (s32[], f32[8,4]{1,0}) tuple(%zero, %p0)
  ROOT %loop = (s32[], /*index=1*/f32[8,4]{1,0}) while(%tuple), condition=%cond, \
body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %done = bf16[8,6]{1,0} all-gather-done(%start)
}
"""


@pytest.fixture(scope="module")
def module():
    return parse(MODULE)


def test_a_module_is_read_in_the_order_of_its_schedule(module):
    main = module[module.entry]
    names = [one.name for one in main.instructions]
    assert names == ["p0", "p1", "zero", "start", "tuple", "loop", "done"]
    assert main.root.name == "loop"
    assert main.by_name["loop"].shapes == (Shape("s32", ()), Shape("f32", (8, 4)))
    assert main.by_name["loop"].trip_count == 5
    assert main.by_name["loop"].calls == ("body",)
    assert main.by_name["start"].calls == ()  # what metadata quotes is no call
    assert [one.name for one in main.readers["tuple"]] == ["loop"]


@pytest.mark.parametrize(
    "dtype, bits", [("bf16", 16), ("f8e4m3fn", 8), ("pred", 8), ("s4", 4), ("c64", 64)]
)
def test_an_element_has_as_many_bits_as_its_dtype_says(dtype, bits):
    assert Shape(dtype, (16,)).bytes == 2 * bits


def test_what_is_in_a_loop_runs_as_often_as_the_loop(module):
    runs = {r.instruction.name: (r.times, len(r.loops)) for r in walk(module)}
    assert runs["ar"] == (5, 1)
    assert runs["start"] == (1, 0)


def test_a_collective_is_listed_with_its_arrays_and_their_unit(module):
    main, body = module["main"], module["body"]
    gather = collective_of(module, main, main.by_name["start"])
    assert (gather.op, gather.unit, gather.group_size) == (
        "all-gather",
        "layers.mlp",
        4,
    )
    assert gather.sent == (Shape("bf16", (2, 6)),)
    assert gather.received == (Shape("bf16", (8, 6)),)
    reduce = collective_of(module, body, body.by_name["ar"])
    assert reduce.groups == frozenset({(0, 1), (2, 3)})
    assert collective_of(module, main, main.by_name["done"]) is None


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,1},{2,3}}", {(0, 1), (2, 3)}),
        ("[2,2]<=[4]", {(0, 1), (2, 3)}),
        ("[2,2]<=[2,2]T(1,0)", {(0, 2), (1, 3)}),
        ("mesh['a'=2,'b'=2] {'b'}", {(0, 1), (2, 3)}),
        ("mesh['a'=2,'b'=2] {'a'}", {(0, 2), (1, 3)}),
        ("{}", set()),
    ],
)
def test_groups_are_read_in_every_way_that_xla_writes_them(written, groups):
    text = MODULE.replace("{{0,1},{2,3}}", written)
    module = parse(text)
    body = module["body"]
    found = collective_of(module, body, body.by_name["ar"])
    assert found.groups == frozenset(groups)


class Mesh:
    def __init__(self, **shape):
        self.shape = shape


def test_groups_lie_along_the_axes_of_the_mesh():
    mesh = Mesh(pp=1, dp_outer=2, dp_shard=4, tp=2)
    for dims, axes in {
        (0,): ("dp_outer",),
        (1,): ("dp_shard",),
        (0, 1): ("dp_outer", "dp_shard"),
        (2,): ("tp",),
    }.items():
        assert axes_of(groups_along([2, 4, 2], dims), mesh) == axes
    assert axes_of(frozenset(), mesh) == ("dp_outer", "dp_shard", "tp")
    assert axes_of(frozenset({(0, 3), (1, 2)}), mesh) is None


def test_groups_of_some_ranks_of_ep_lie_along_it():
    mesh = Mesh(dp_shard=2, ep=4, cp=1, tp=2)
    within = frozenset({(0, 2), (4, 6), (8, 10), (12, 14)})
    between = frozenset({(0, 4), (2, 6), (8, 12), (10, 14)})
    assert axes_of(within, mesh) == axes_of(between, mesh) == ("ep",)
    assert axes_of(frozenset({(0, 3), (4, 7)}), mesh) is None
    assert axes_of(frozenset({(0, 10), (4, 6)}), mesh) is None


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=facts("ENTRY", "compiled.as_text()")):
        parse("module @jit_step {}")


MERGED = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%concatenated (p.0: f32[6], p.1: f32[3]) -> f32[9] {
  %p.0 = f32[6]{0} parameter(0)
  %p.1 = f32[3]{0} parameter(1)
  ROOT %all = f32[9]{0} concatenate(%p.0, %p.1), dimensions={0}
}

ENTRY %main (p0: f32[2,3], p1: f32[3]) -> f32[9] {
  %p0 = f32[2,3]{1,0} parameter(0)
  %p1 = f32[3]{0} parameter(1)
  %grad = f32[2,3]{1,0} negate(%p0), metadata={op_name="jit(step)/unit:a/neg"}
  %flat = f32[6]{0} bitcast(%grad)
  %sums = f32[3]{0} negate(%p1), metadata={op_name="jit(step)/optimizer/neg"}
  %both = f32[9]{0} fusion(%flat, %sums), kind=kLoop, calls=%concatenated
  %own = f32[3]{0} all-reduce(%sums), replica_groups={{0,1}}, to_apply=%add, \
metadata={op_name="jit(step)/psum"}
  ROOT %ar = f32[9]{0} all-reduce(%both), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_what_xla_concatenated_to_reduce_has_the_scopes_of_its_parts():
    mesh = fsdp.make_mesh(devices=jax.devices()[:2])
    program = program_of(MERGED, mesh)
    own, merged = communicated_arrays(program, mesh)
    parts = list(parts_of(program.module, merged))
    assert [(one.sent, one.scope) for one in parts] == [
        ((6,), "jit(step)/unit:a/neg"),
        ((3,), "jit(step)/optimizer/neg"),
    ]
    # One with a scope of its own stays as it is.
    assert list(parts_of(program.module, own)) == [own]
