"""A run goes from Megatron to JAX and back, and from format to format."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import like_of
from helpers.errors import facts

import bridge
from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.megatron import (
    MegatronCheckpoint,
    MegatronOptimizer,
    convert_megatron,
    load_megatron_adam,
    open_megatron,
    save_megatron_adam,
    trim_vocab,
)

VOCAB = 331
BUCKETS = {"data_parallel_size": 2, "ddp_bucket_size": 3000}


def optimizer_of(run: MegatronCheckpoint) -> MegatronOptimizer:
    assert run.optimizer is not None, run.left_out
    return run.optimizer


def assert_same(found: Source, expected: Source, keys=None) -> None:
    """Asserts the same bits, apart from the rows that pad the vocabulary."""
    found, expected = trim_vocab(found, VOCAB), trim_vocab(expected, VOCAB)
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():
        assert found.dtype(key) == expected.dtype(key), key
        assert found.read(key).tobytes() == expected.read(key).tobytes(), key


def assert_same_run(found: MegatronCheckpoint, run: MegatronCheckpoint) -> None:
    ours, theirs = optimizer_of(found), optimizer_of(run)
    assert_same(found.source, run.source)
    assert_same(ours.exp_avg, theirs.exp_avg)
    assert_same(ours.exp_avg_sq, theirs.exp_avg_sq)
    if theirs.master is not None:
        assert ours.master is not None
        assert_same(ours.master, theirs.master)
    assert ours.step == theirs.step
    assert found.consumed_samples == run.consumed_samples


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def begun(request, golden) -> tuple[MegatronCheckpoint, Any, Any]:
    run = open_megatron(golden(request.param) / "torch_dist")
    config = bridge.megatron.from_args(run.args)
    return run, config, load_megatron_adam(run.path, like_of(config))


def groups_of(run: MegatronCheckpoint) -> dict[str, Any]:
    return {
        "param_groups": optimizer_of(run).param_groups,
        "scheduler": run.scheduler,
        "consumed_samples": run.consumed_samples,
        "iteration": run.iteration,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer_format": "dp_reshardable", "tensor_parallel": 2, "flags": BUCKETS},
        {"format": "legacy", "pipeline_parallel": 2},
    ],
    ids=["by name", "buckets", "legacy"],
)
def test_a_run_goes_from_megatron_to_jax_and_back(begun, tmp_path, options):
    run, config, adam = begun
    narrow = run.source.dtype("decoder.final_layernorm.weight")
    save_megatron_adam(
        tmp_path / "out", adam, config, param_dtype=narrow, **groups_of(run), **options
    )
    found = open_megatron(tmp_path / "out")
    assert_same_run(found, run)
    assert found.iteration == run.iteration
    assert found.scheduler == {**run.scheduler, "num_steps": run.consumed_samples}
    # Experts have groups of their own with expert parallelism alone.
    numbers = [len(optimizer_of(r).param_groups) for r in (found, run)]
    assert numbers[0] == (2 if {"format", "flags"} & options.keys() else numbers[1])


def test_a_run_that_jax_began_has_megatrons_groups(begun, tmp_path):
    _, config, adam = begun
    settings = dataclasses.replace(adam.settings, lr=0.5, weight_decay=0.25)
    begun_here = dataclasses.replace(adam, settings=settings, count=jnp.int32(11))
    save_megatron_adam(tmp_path / "out", begun_here, config, format="fsdp_dtensor")
    again = load_megatron_adam(tmp_path / "out", like_of(config))
    assert int(again.count) == 11
    for name in ("lr", "b1", "b2", "eps", "weight_decay", "no_decay"):
        assert getattr(again.settings, name) == getattr(settings, name), name
    for tree in ("params", "mu", "nu"):
        ours, theirs = (named_leaves(getattr(x, tree)) for x in (again, adam))
        for name, leaf in ours.items():
            assert np.asarray(leaf).tobytes() == np.asarray(theirs[name]).tobytes(), (
                name
            )


def test_open_hyperparameters_are_named(begun, tmp_path):
    _, config, adam = begun
    settings = dataclasses.replace(adam.settings, b1=None, no_decay=("norm.scale",))
    with pytest.raises(ValueError, match=facts("b1", "no_decay", "`param_groups`")):
        save_megatron_adam(
            tmp_path / "out", dataclasses.replace(adam, settings=settings), config
        )
    assert not (tmp_path / "out").exists()


def test_moments_of_other_weights_are_refused(begun, tmp_path):
    run, config, adam = begun
    other = dataclasses.replace(
        adam, mu=jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 3)), adam.mu)
    )
    with pytest.raises(ValueError, match=facts("3")):
        save_megatron_adam(tmp_path / "out", other, config, **groups_of(run))


def convert(tmp_path: Path, src: Path, *steps: dict[str, Any]) -> MegatronCheckpoint:
    for number, options in enumerate(steps):
        dst = tmp_path / str(number)
        convert_megatron(src, dst, **options)
        src = dst
    return open_megatron(src)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_run_goes_through_other_formats_and_back(golden, tmp_path, name):
    run = open_megatron(golden(name) / "torch_dist")
    found = convert(
        tmp_path,
        run.path,
        {"format": "fsdp_dtensor"},
        {"format": "legacy", "optimizer_format": "distributed", "tp": 2, "pp": 2},
        {"format": "torch_dist"},
    )
    assert_same_run(found, run)
    assert found.scheduler == run.scheduler
    assert found.iteration == run.iteration


def test_weights_alone_are_converted_where_there_is_no_optimizer(golden, tmp_path):
    run = golden("qwen3") / "legacy"
    with pytest.raises(ValueError, match=facts("optimizer=False", "'rng_state'")):
        convert_megatron(run, tmp_path / "out", format="fsdp_dtensor")
    left_out = convert_megatron(
        run, tmp_path / "out", format="fsdp_dtensor", optimizer=False
    )
    assert "'rng_state'" in "\n".join(left_out)
    assert_same(open_megatron(tmp_path / "out").source, open_megatron(run).source)
