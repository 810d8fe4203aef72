"""What a step is compiled with: known to this XLA, replaceable, and never fatal."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.training._compiler_options import (
    options_for,
    options_of,
    pipelining_modes,
)

TX = optax.sgd(0.1)
UNKNOWN = {"xla_gpu_no_such_option": True}


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 8))}, fsdp.make_mesh())


def loss(params, batch):
    return jnp.mean(batch @ params["w"])


def lowered(plan, **options):
    step = fsdp.make_train_step(plan, loss, TX, **options)
    return step.lower(fsdp.abstract_state(plan, TX), np.ones((8, 8), np.float32))


@pytest.fixture
def passed(monkeypatch) -> list:
    """The compiler options of each `jax.jit` from here on."""
    seen = []
    jit = jax.jit

    def spy(*args, compiler_options=None, **options):
        seen.append(compiler_options)
        return jit(*args, **options)

    monkeypatch.setattr(jax, "jit", spy)
    return seen


@dataclasses.dataclass(frozen=True)
class Mesh:
    """One device of a platform."""

    platform: str
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def shape(self):
        return {"ep": self.ep, "cp": self.cp, "tp": self.tp}

    @property
    def devices(self):
        return np.array([SimpleNamespace(platform=self.platform)])


def planned(platform):
    """A plan without parameters, on one device of a platform."""
    return SimpleNamespace(mesh=Mesh(platform), param_plans=())


def plan_on_gpus(plan):
    """The same plan, whose mesh says that its devices are GPUs."""
    gpus = np.array([SimpleNamespace(platform="gpu")])
    mesh = SimpleNamespace(shape=plan.mesh.shape, devices=gpus)
    return SimpleNamespace(mesh=mesh, param_plans=plan.param_plans)


def test_jax_0_11_computes_a_product_once_that_is_saved_for_backward():
    # Its name is known to the XLA of either lane, where it is off anyway.
    name = "xla_gpu_enable_dynamic_slice_fusion"
    assert fsdp.training.compiler_options("0.11.2")[name] is False
    assert name not in fsdp.training.compiler_options("0.10.2")
    assert name not in fsdp.training.compiler_options("0.12.0")
    jax.jit(lambda x: x, compiler_options={name: False}).lower(1.0).compile()


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_this_xla_knows_every_option(axis):
    # The names are the same on every backend, so that CPUs check those of GPUs.
    kind = {"tp": "tensor", "cp": "context", "ep": "expert"}[axis]
    options = fsdp.training.compiler_options(**{f"{kind}_parallel": True})
    assert options.items() > fsdp.training.compiler_options().items()
    assert options == options_of(Mesh("gpu", **{axis: 2}))
    assert jax.jit(lambda x: x * 2, compiler_options=options)(1.0) == 2


def test_this_xla_knows_what_keeps_parts_of_a_batch_apart():
    plain = fsdp.training.compiler_options(batch_parts=1)
    options = fsdp.training.compiler_options(batch_parts=2)
    assert plain == fsdp.training.compiler_options()
    assert options.items() > plain.items() and len(options) == len(plain) + 2
    assert options == options_for(planned("gpu"), None, batch_parts=2)
    assert jax.jit(lambda x: x * 2, compiler_options=options)(1.0) == 2


@pytest.mark.parametrize(
    "axis, config",
    [
        ("tp", {"tensor_parallel": {"unit.w": 1}}),
        ("cp", {"context_parallel": {"*": 1}}),
        ("ep", {}),
    ],
)
def test_those_of_a_plan_are_those_that_its_step_has_on_gpus(axis, config):
    mesh, config = fsdp.make_mesh(**{axis: 2}), fsdp.FSDPConfig(**config)
    model = {"unit": {"w": jnp.ones((8, 8))}}
    plan = fsdp.fully_shard(lambda key: model, mesh, ["unit"], config)
    options = fsdp.training.compiler_options(plan=plan)
    assert options == options_for(plan_on_gpus(plan), None)
    of_mesh = options_of(mesh)
    assert options.keys() == of_mesh.keys() and options != of_mesh
    assert {n for n in options if options[n] != of_mesh[n]} <= {
        f"xla_gpu_{kind}_combine_threshold_bytes"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }


@pytest.mark.parametrize("mode", pipelining_modes())
def test_this_xla_knows_the_options_that_are_not_measured(mode):
    plain = fsdp.training.compiler_options()
    options = fsdp.training.compiler_options(pipelining=mode, symmetric_buffers=True)
    assert options.items() > plain.items() and len(options) == len(plain) + 3
    assert jax.jit(lambda x: x * 2, compiler_options=options)(1.0) == 2


def test_an_xla_without_marks_says_what_it_has():
    options = fsdp.training.compiler_options
    with pytest.raises(ValueError, match=facts("'marked'", "0.10.2", "'all'", "0.12")):
        options("0.10.2", pipelining="marked")
    assert options("0.12.0", pipelining="marked") != options("0.12.0", pipelining="all")


def test_jit_and_compile_both_take_them(plan):
    options = fsdp.training.compiler_options()
    lowered(plan, compiler_options=options).compile(compiler_options=options)


@pytest.mark.parametrize("version", ["0.10.2", "0.11.2", "0.12.0.1", "0.12.1.dev3"])
def test_each_version_has_its_options(version):
    options = fsdp.training.compiler_options(version)
    assert options["xla_gpu_enable_latency_hiding_scheduler"]
    assert options["xla_gpu_nccl_termination_timeout_seconds"] == 600
    # For a process that is alive but stuck, which the other one does not see.
    assert options["xla_gpu_execution_terminate_timeout"] == "1800s"


def test_a_newer_version_gets_the_newest_known():
    newest = fsdp.training.compiler_options("0.12.0")
    assert (
        fsdp.training.compiler_options("0.13.0")
        == fsdp.training.compiler_options("1.0")
        == newest
    )


@pytest.mark.parametrize(
    "version, says", [("0.9.2", ["jaxlib", "0.9.2", "0.10"]), ("new", ["'new'"])]
)
def test_no_version_and_too_old_a_version_are_refused(version, says):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.training.compiler_options(version)


def test_each_caller_gets_a_dict_of_its_own():
    fsdp.training.compiler_options().clear()
    assert fsdp.training.compiler_options()


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_a_mesh_of_gpus_gets_them_unasked(platform):
    found = planned(platform)
    assert options_for(found, None) == fsdp.training.compiler_options()
    assert options_for(found, {}) == {}
    assert options_for(found, {"a": 1}) == {"a": 1}


def test_no_collectives_of_two_units_are_combined():
    def make(key):
        del key
        names = ("a", "b")
        return {"layers": {n: {"w": jnp.zeros((2, 16, 8))} for n in names}}

    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    config = fsdp.FSDPConfig(mp_policy=policy)
    units = ["layers.a", fsdp.Stacked("layers.b")]
    plan = fsdp.fully_shard(make, fsdp.make_mesh(), units, config)
    options = fsdp.training.compiler_options(plan=plan)
    thresholds = {n: v for n, v in options.items() if n.endswith("threshold_bytes")}
    # The larger unit has 256 elements, one of the stack half as many. Weights are
    # gathered in bfloat16, gradients reduced in float32. XLA counts what a rank gets of
    # a reduce-scatter: an eighth.
    assert sorted(thresholds.values()) == [128, 512, 1024]
    assert options.keys() == fsdp.training.compiler_options().keys()


def test_a_mesh_of_cpus_gets_none_unasked(plan, passed):
    fsdp.make_train_step(plan, loss, TX)
    assert passed[-1] == {}


def test_what_is_given_reaches_jit_as_it_is(plan, passed):
    given = {"xla_gpu_autotune_level": 0}
    fsdp.make_train_step(plan, loss, TX, compiler_options=given)
    assert passed[-1] == given


def test_an_unknown_option_raises_and_the_process_lives(plan):
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=facts("'xla_gpu_no_such_option'")
    ):
        lowered(plan, compiler_options=UNKNOWN).compile()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=facts("'xla_gpu_no_such_option'")
    ):
        lowered(plan).compile(compiler_options=UNKNOWN)


def test_a_value_that_xla_cannot_read_raises(plan):
    options = {"xla_gpu_autotune_level": "maybe"}
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=facts("xla_gpu_autotune_level", "'maybe'")
    ):
        lowered(plan, compiler_options=options).compile()
