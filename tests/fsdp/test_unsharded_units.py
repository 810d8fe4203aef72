"""The audit counts the units that a schedule leaves unsharded at once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.audit._check_unsharded import merged, too_many
from fsdp_jax.audit._expected import expected_collectives
from fsdp_jax.audit._unsharded_units import unsharded
from fsdp_jax.hlo._parse import parse
from fsdp_jax.hlo._program import Program, communicated_arrays

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def plan():
    """Three units of one matrix each, `[16, 4]` on a device that gathers it."""

    def make(key):
        del key
        return {"layers": {name: {"w": jnp.zeros((16, 4))} for name in NAMES}}

    return fsdp.fully_shard(make, fsdp.make_mesh(), ["layers.*"])


@pytest.fixture(scope="module")
def stack():
    """The same three as a stack."""

    def make(key):
        del key
        return {"layers": {"w": jnp.zeros((3, 16, 4))}}

    return fsdp.fully_shard(make, fsdp.make_mesh(), [fsdp.Stacked("layers")])


HEAD = "HloModule step, is_scheduled=true"
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"


def begin(name):
    scope = f'metadata={{op_name="jit(step)/unit:layers.{name}/all_gather"}}'
    return (
        f"%s.{name} = (f32[2,4], f32[16,4]) all-gather-start(%w.{name}), {ALL}, {scope}"
    )


def end(name):
    return f"%{name} = f32[16,4] all-gather-done(%s.{name})"


def use(result, name, x="x"):
    gemm = 'custom_call_target="gemm"'
    return f"%{result} = f32[8,16] custom-call(%{x}, %{name}), {gemm}"


def program(*lines):
    given = [f"%w.{name} = f32[2,4] parameter({i})" for i, name in enumerate(NAMES)]
    given.append("%x = f32[8,16] parameter(3)")
    *first, last = [*given, *lines]
    listed = "\n  ".join([*first, f"ROOT {last}"])
    entry = f"ENTRY %main (p: f32[2,4]) -> f32[8,16] {{\n  {listed}\n}}\n"
    return Program(parse(f"{HEAD}\n\n{entry}"), False, is_cpu=False, is_scheduled=True)


def found(plan, compiled):
    arrays = list(communicated_arrays(compiled, plan.mesh))
    return arrays, expected_collectives(plan)


def count(plan, compiled):
    return unsharded(compiled, *found(plan, compiled)).units


ONE_AHEAD = [
    *(begin("a"), end("a")),
    *(begin("b"), use("y", "a"), end("b")),
    *(begin("c"), use("z", "b", "y"), end("c")),
    use("out", "c", "z"),
]
ALL_AT_ONCE = [
    *(begin("a"), begin("b"), begin("c"), end("a"), end("b"), end("c")),
    *(use("y", "a"), use("z", "b", "y"), use("out", "c", "z")),
]


def test_what_is_gathered_one_ahead_is_two_units_at_once(plan):
    compiled = program(*ONE_AHEAD)
    assert count(plan, compiled) == 2
    assert not list(too_many(plan, compiled, *found(plan, compiled)))


def test_units_that_are_unsharded_together_are_named_with_their_number(plan):
    compiled = program(*ALL_AT_ONCE)
    (difference,) = too_many(plan, compiled, *found(plan, compiled))
    line = str(difference)
    assert re.search(facts("'layers.c'", "prefetch=1", 2, 3, "s.c"), line)


def test_a_view_of_a_weight_keeps_its_unit_unsharded(plan):
    view = "%t = f32[4,16] transpose(%a), dimensions={1,0}"
    lines = [*ONE_AHEAD[:3], view, *ONE_AHEAD[3:-1], use("u", "c", "z")]
    assert count(plan, program(*lines, use("out", "t", "u"))) == 3


def test_without_units_of_their_own_gathers_are_not_merged(plan):
    """As under ZeRO-1 and ZeRO-2, where a step begins with all of them."""
    arrays, _ = found(plan, program(*ONE_AHEAD))
    assert not list(merged(arrays, []))


def test_merged_gathers_are_named(plan):
    sides = "(f32[2,4], f32[2,4]), (f32[16,4], f32[16,4])"
    both = f"%s.a = ({sides}) all-gather-start(%w.a, %w.b), {ALL}"
    done = "%both = (f32[16,4], f32[16,4]) all-gather-done(%s.a)"
    parts = [
        f"%{n} = f32[16,4] get-tuple-element(%both), index={i}"
        for i, n in enumerate("ab")
    ]
    lines = [both, done, *parts, use("y", "a"), use("out", "b", "y")]
    compiled = program(*lines)
    (difference,) = merged(*found(plan, compiled))
    assert re.search(facts("s.a", 2), str(difference))
    assert not list(merged(*found(plan, program(*ONE_AHEAD))))


TRIPS = 'backend_config={"known_trip_count":{"n":"3"}}'
KIND = "(s32[], f32[3,2,4], f32[8,16], f32[16,4])"
BODY = """
%sliced (a: f32[3,2,4], b: s32[]) -> f32[2,4] {
  %a = f32[3,2,4] parameter(0)
  %b = s32[] parameter(1)
  ROOT %slice = f32[2,4] dynamic-slice(%a, %b), dynamic_slice_sizes={1,2,4}
}

%body (p: KIND) -> KIND {
  %p = KIND parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[3,2,4] get-tuple-element(%p), index=1
  %x = f32[8,16] get-tuple-element(%p), index=2
  %piece = f32[2,4] fusion(%stack, %i), kind=kLoop, calls=%sliced
  START
  %now = f32[16,4] get-tuple-element(%p), index=3
  %y = f32[8,16] custom-call(%x, %now), custom_call_target="gemm"
  %ahead = f32[16,4] all-gather-done(%s)
  %later = f32[16,4] copy(%ahead)
  ROOT %out = KIND tuple(%i, %stack, %y, %later)
}
"""


def test_a_loop_holds_what_it_carries_and_what_it_gathers(stack):
    scope = 'metadata={op_name="jit(step)/unit:layers/while/body/prefetch/all_gather"}'
    begin = f"%s = (f32[2,4], f32[16,4]) all-gather-start(%piece), {ALL}, {scope}"
    entry = f"""
ENTRY %main (a: f32[3,2,4], b: f32[8,16], c: f32[2,4]) -> f32[8,16] {{
  %a = f32[3,2,4] parameter(0)
  %b = f32[8,16] parameter(1)
  %c = f32[2,4] parameter(2)
  %zero = s32[] constant(0)
  %s0 = (f32[2,4], f32[16,4]) all-gather-start(%c), {ALL}, {scope}
  %first = f32[16,4] all-gather-done(%s0)
  %given = {KIND} tuple(%zero, %a, %b, %first)
  %loop = {KIND} while(%given), body=%body, {TRIPS}
  %last = f32[16,4] get-tuple-element(%loop), index=3
  %x = f32[8,16] get-tuple-element(%loop), index=2
  ROOT %out = f32[8,16] custom-call(%x, %last), custom_call_target="gemm"
}}
"""
    text = HEAD + "\n" + BODY.replace("START", begin).replace("KIND", KIND) + entry
    compiled = Program(parse(text), False, is_cpu=False, is_scheduled=True)
    assert count(stack, compiled) == 2


READS = "(f32[8,16], f32[16,4])"


@pytest.mark.parametrize(("result", "units"), [("now", 1), ("new", 2)])
def test_a_weight_that_a_loop_only_reads_is_the_same_behind_it(plan, result, units):
    text = f"""{HEAD}

%negated (a: f32[16,4]) -> f32[16,4] {{
  %a = f32[16,4] parameter(0)
  ROOT %minus = f32[16,4] negate(%a)
}}

%body (p: {READS}) -> {READS} {{
  %p = {READS} parameter(0)
  %x = f32[8,16] get-tuple-element(%p), index=0
  %now = f32[16,4] get-tuple-element(%p), index=1
  {use("y", "now")}
  %new = f32[16,4] fusion(%now), kind=kLoop, calls=%negated
  ROOT %out = {READS} tuple(%y, %{result})
}}

ENTRY %main (w.a: f32[2,4], x: f32[8,16]) -> f32[8,16] {{
  %w.a = f32[2,4] parameter(0)
  %x = f32[8,16] parameter(1)
  {begin("a")}
  {end("a")}
  %given = {READS} tuple(%x, %a)
  %loop = {READS} while(%given), body=%body, {TRIPS}
  %y = f32[8,16] get-tuple-element(%loop), index=0
  %left = f32[16,4] get-tuple-element(%loop), index=1
  {use("z", "left", "y")}
  ROOT {use("out", "a", "z")}
}}
"""
    compiled = Program(parse(text), False, is_cpu=False, is_scheduled=True)
    assert count(plan, compiled) == units


STACKS = "(s32[], f32[3,16,4], f32[16,4])"


@pytest.mark.parametrize("opcode", ["fusion", "dynamic-update-slice"])
def test_weights_that_a_loop_stacks_are_all_unsharded(plan, opcode):
    write = f"%kept = f32[3,16,4] {opcode}(%stack, %now, %i)"
    if opcode == "fusion":
        write += ", kind=kLoop, calls=%write"
    text = f"""{HEAD}

%write (a: f32[3,16,4], b: f32[16,4], c: s32[]) -> f32[3,16,4] {{
  %a = f32[3,16,4] parameter(0)
  %b = f32[16,4] parameter(1)
  %c = s32[] parameter(2)
  ROOT %written = f32[3,16,4] dynamic-update-slice(%a, %b, %c)
}}

%body (p: {STACKS}) -> {STACKS} {{
  %p = {STACKS} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[3,16,4] get-tuple-element(%p), index=1
  %now = f32[16,4] get-tuple-element(%p), index=2
  {write}
  ROOT %out = {STACKS} tuple(%i, %kept, %now)
}}

ENTRY %main (w.a: f32[2,4], x: f32[8,16]) -> f32[8,16] {{
  %w.a = f32[2,4] parameter(0)
  %x = f32[8,16] parameter(1)
  {begin("a")}
  {end("a")}
  %zero = s32[] constant(0)
  %zeros = f32[3,16,4] broadcast(%zero), dimensions={{}}
  %given = {STACKS} tuple(%zero, %zeros, %a)
  %loop = {STACKS} while(%given), body=%body, {TRIPS}
  %left = f32[3,16,4] get-tuple-element(%loop), index=1
  ROOT {use("out", "left")}
}}
"""
    compiled = Program(parse(text), False, is_cpu=False, is_scheduled=True)
    assert count(plan, compiled) == 4  # The stack, and the weight that it is made of.


LAYERS, WIDTH = 5, 256


def make_layers(key):
    keys = jax.random.split(key, LAYERS)
    return {"layers": [{"w": jax.random.normal(key, (WIDTH, WIDTH))} for key in keys]}


def run_layers(model, batch):
    run = fsdp.unit(lambda layer, x: jnp.tanh(x @ layer["w"]))
    for layer in model["layers"]:
        batch = run(layer, batch)
    return (batch**2).mean()


def compiled_for(gpus, prefetch):
    config = fsdp.FSDPConfig(prefetch=prefetch)
    mesh = fsdp.make_mesh(devices=gpus)
    plan = fsdp.fully_shard(make_layers, mesh, ["layers.*"], config)
    step = fsdp.make_train_step(plan, run_layers, optax.sgd(1e-2))
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    return plan, step.lower(fsdp.abstract_state(plan, optax.sgd(1e-2)), batch).compile()


@pytest.mark.plan
def test_a_model_whose_order_is_left_to_xla_is_found_out(gpus):
    plan, ordered = compiled_for(gpus, prefetch=1)
    fsdp.audit_step(plan, ordered)
    _, left = compiled_for(gpus, prefetch=0)
    with pytest.raises(fsdp.audit.AuditError, match=facts("prefetch=1", LAYERS)):
        fsdp.audit_step(plan, left)
