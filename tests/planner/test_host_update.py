"""Why the optimizer is not updated on the host: what XLA makes of it on GPUs.

`jax.experimental.compute_on` runs a part of a program on the host's CPU. These are
facts of XLA as it is installed; when one fails, `OffloadPolicy` may have an update on
the host.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts
from jax._src import compute_on
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._host_memory import _marked, _name

pytestmark = pytest.mark.plan

SIZE = 2**20
NBYTES = 4 * SIZE
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def adam(grad, mu, nu, param):
    mu, nu = 0.9 * mu + 0.1 * grad, 0.99 * nu + 0.01 * grad**2
    return param - 1e-2 * mu / (jnp.sqrt(nu) + 1e-8), mu, nu


def on_host(*arrays):
    # jax 0.10 has the function of 0.12 under this name.
    run_on = getattr(compute_on, "compute_on2", compute_on.compute_on)
    run = run_on(adam, compute_type="device_host", out_memory_spaces=HOST)
    param, mu, nu = run(*jax.device_put(arrays, HOST))
    return jax.device_put(param, DEVICE), mu, nu


def compiled(num_devices, donated):
    """The update with moments on the host, as `mark_host_arguments` says it."""
    devices = gpu_devices(GPUS["h100"], num_devices)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    shape = jax.ShapeDtypeStruct((SIZE,), jnp.float32, sharding=sharding)
    lowered = jax.jit(on_host, donate_argnums=donated).lower(*[shape] * 4)
    module = lowered.compiler_ir(dialect="stablehlo")
    (main,) = (op for op in module.body.operations if "main" in str(op.name))
    with module.context:
        main.arg_attrs = ir.ArrayAttr.get(
            [
                _marked(given)
                if "arrays[1]" in _name(a) or "arrays[2]" in _name(a)
                else given
                for a, given in zip(main.arguments, main.arg_attrs, strict=True)
            ]
        )
    return lowered.compile()


def test_on_one_gpu_the_updated_weights_are_left_on_the_host():
    stats = compiled(1, donated=(1, 2)).memory_analysis()
    assert stats.host_argument_size_in_bytes == 2 * NBYTES
    assert stats.host_output_size_in_bytes == 3 * NBYTES


def test_on_one_gpu_donated_weights_do_not_compile():
    with pytest.raises(jax.errors.JaxRuntimeError, match=facts("S(5)")):
        compiled(1, donated=(1, 2, 3))


def test_on_several_gpus_the_moments_are_on_the_host_twice_and_copied():
    program = compiled(4, donated=(1, 2, 3))
    stats = program.memory_analysis()
    assert stats.host_argument_size_in_bytes == 2 * NBYTES / 4
    # Beside copies of gradients and weights, new moments that are not in place.
    assert stats.host_temp_size_in_bytes == 4 * NBYTES / 4
    text = program.as_text()
    copies = re.findall(r"= f32\[262144\]\{0:S\(5\)\} copy\(", text)
    assert (len(copies), text.count("HostExecute")) == (2, 1)


def test_on_cpus_the_update_is_the_same_to_the_bit():
    arrays = np.random.default_rng(0).random((4, 64), np.float32)
    found = jax.jit(on_host)(*arrays)
    for got, want in zip(found, jax.jit(adam)(*arrays), strict=True):
        np.testing.assert_array_equal(got, want)
