"""A sweep shows every variant, and says which are one and the same step."""

from __future__ import annotations

import types

import jax
import optax
import pytest
from helpers.llama import Llama, tokens

import fsdp_jax as fsdp
from fsdp_jax.planner import Sweep, find_gpu

TINY = Llama(width=64, mlp=128, heads=2, kv_heads=1, layers=2, vocab=256, head_dim=32)


def estimate(seconds, *, fits=True, memory=1 << 30):
    gpu = find_gpu("h100")
    return types.SimpleNamespace(
        timeline=types.SimpleNamespace(seconds=seconds, exposed_seconds=0.2 * seconds),
        compiled_bytes=memory,
        fits=fits,
        gpu=gpu,
        num_gpus=16,
        num_params=8_030_000_000,
        tokens=65536,
    )


def test_the_picture_has_every_variant_and_a_title(tmp_path):
    found = Sweep(
        {
            "FSDP (ZeRO-3)": estimate(1.0),
            "HSDP, a replica a node": estimate(0.9),
            "ZeRO-1": estimate(0.8, fits=False, memory=100 << 30),
        }
    )
    found.save_picture(tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text()
    # matplotlib draws letters as outlines, and writes each text in a comment.
    for name in found.estimates:
        assert f"<!-- {name} -->" in drawn
    title = "16 x NVIDIA H100 80GB HBM3, 8.03 billion parameters, 65,536 tokens a step"
    assert f"<!-- {title} -->" in drawn


def test_what_differs_in_time_or_memory_is_not_the_same_step():
    found = Sweep(
        {"a": estimate(1.0), "b": estimate(1.1), "c": estimate(1.0, memory=9)}
    )
    assert found.equal == ()


@pytest.mark.plan
def test_zero_1_and_zero_2_are_one_step_with_one_microbatch():
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        found = Sweep({f"ZeRO-{zero}": compiled(zero) for zero in (1, 2)})
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    assert found.equal == (("ZeRO-1", "ZeRO-2"),)
    said = "ZeRO-1 and ZeRO-2 compile to the same step: with one microbatch"
    assert said in repr(found) and said in found._repr_html_()


def compiled(zero):
    plan = TINY.plan(fsdp.make_mesh(devices=jax.devices()[:1]), zero_dp_strategy=zero)
    return fsdp.estimate_step(
        *(plan, TINY.loss(1), optax.adamw(1e-3), tokens(8, 64)), gpus=8, guide=False
    )
