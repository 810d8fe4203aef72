"""Jobs of four processes with two devices each, and of two: all of it, in two starts.

With verl's own cases (`tests/special_distributed/`) and their exact values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_helpers import assert_same_bytes, random_tensors, tensors_of, write_llama
from distributed import training
from distributed.importing import import_and_export
from helpers.processes import run_processes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._tokens import Tokens
from fsdp_jax.cli.commands._eval import perplexity

pytestmark = pytest.mark.distributed

PROCESSES = 4
ROWS, VOCAB = 256, 155_136


def scenario_of_four(directory: str) -> dict[str, Any]:
    return {
        "gathered": all_gather_data_proto(),
        "metrics": allgather_dict_into_dict(),
        "entropy": vocab_parallel_entropy(),
        "training": {name: training.train(name) for name in training.STRATEGIES},
        "checkpoint": training.step_save_step_load_step(f"{directory}/run"),
        "tail": uneven_tail(),
    }


def all_gather_data_proto() -> dict[str, Any]:
    """Rows of their own in each rank of 2 x 2, gathered along the first axis."""
    rank = jax.process_index()
    first_devices = [d for d in jax.devices() if d.id % 2 == jax.devices()[0].id % 2]
    mesh = Mesh(np.array(first_devices).reshape(2, 2), ("dp", "tp"))
    obs = np.array([[rank, 2 * rank + 1], [3 * rank, 4 * rank + 1]])
    labels = ["a", "b"] if rank % 2 == 0 else ["b", "a"]
    words = fsdp.rl.Jagged.from_rows([np.arange(rank), np.arange(1)])
    batch = fsdp.rl.Batch(
        {"obs": obs, "words": words}, {"labels": labels}, {"info": f"of {rank}"}
    )
    gathered = fsdp.rl.all_gather(batch, mesh, "dp")
    return {
        "obs": gathered.arrays["obs"].tolist(),
        "lengths": gathered.arrays["words"].lengths.tolist(),
        "labels": gathered.objects["labels"].tolist(),
        "meta": gathered.meta,
    }


def allgather_dict_into_dict() -> dict[str, Any]:
    rank = jax.process_index()
    metrics = {"loss": [rank, rank + 1, rank + 2], "grad_norm": rank}
    return fsdp.rl.allgather_dict_into_dict(metrics | ({"odd": 1} if rank % 2 else {}))


def vocab_parallel_entropy() -> dict[str, float]:
    """How far values and gradients are from those of whole rows; tp crosses processes.

    Devices 0 and 2 share a row, of processes 0 and 1; 1 and 3 another; and so on.
    """
    devices = np.array(jax.devices()).reshape(2, 2, 2).transpose(0, 2, 1)
    mesh = fsdp.make_mesh(tp=2, devices=devices.ravel().tolist())
    sharding = NamedSharding(mesh, P("dp_shard", "tp"))
    share = ROWS // 4

    def rows(start: int) -> np.ndarray:
        random = np.random.default_rng(start)
        return random.standard_normal((share, VOCAB), np.float32)

    logits = jax.make_array_from_callback(
        (ROWS, VOCAB), sharding, lambda i: rows(i[0].start or 0)[:, i[1]]
    )

    def total(z):
        values = ops.vocab_parallel_entropy(z)
        return values.sum(), values

    with jax.set_mesh(mesh):
        (_, values), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    mine = logits.addressable_shards[0]
    above = rows(mine.index[0].start or 0)
    p = np.exp(above - above.max(-1, keepdims=True), dtype=np.float32)
    p /= p.sum(-1, keepdims=True)
    log_p = np.log(p)
    want = -(p * log_p).sum(-1)
    want_grads = (-p * (log_p + want[:, None]))[:, mine.index[1]]
    value = next(s for s in values.addressable_shards if s.device == mine.device)
    grad = next(s for s in grads.addressable_shards if s.device == mine.device)
    return {
        "values": float(np.abs(value.data - want).max() / want.max()),
        "grads": float(np.abs(grad.data - want_grads).max() / np.abs(want_grads).max()),
        "logits": float(np.abs(mine.data - above[:, mine.index[1]]).max()),
    }


def uneven_tail() -> dict[str, Any]:
    """A last batch of 11 of 16 rows: which rows each device got, and which are real."""
    mesh = fsdp.make_mesh()
    shard = fsdp.host_shard(mesh)
    last = fsdp.HostBatches(np.arange(27), 16, shard)[1]
    rows, mask = fsdp.data.padded_global_batch(mesh, last, 16)
    count = jax.jit(
        lambda x, m: jnp.where(m, x, 0).sum(), out_shardings=NamedSharding(mesh, P())
    )
    return {
        "shard": [shard.index, shard.count],
        "mine": last.tolist(),
        "mask": [np.asarray(s.data).tolist() for s in mask.addressable_shards],
        "sum": int(count(rows, mask)),
    }


def evaluate_text(directory: str) -> dict[str, Any]:
    """As `fsdp-jax eval` does, of rows that do not fill the last batch."""
    config = bridge.from_hf_config(f"{directory}/llama")
    plan = plan_decoder(config, fsdp.make_mesh())
    params = bridge.load_hf(f"{directory}/llama", plan.params)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 300)
    return perplexity(plan, params, Tokens((ids[:99], ids[99:])), batch=8, seq=24)


def scenario_of_two(directory: str) -> dict[str, Any]:
    """With four devices each: what four have saved, and what Hugging Face has."""
    return {
        "evaluated": evaluate_text(directory),
        "restored": training.go_on(f"{directory}/run"),
        "import": import_and_export(Path(directory)),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_llama(folder / "llama", np.float32)
    return folder


@pytest.fixture(scope="module")
def four(directory) -> list[dict[str, Any]]:
    return run_processes(scenario_of_four, PROCESSES, str(directory), timeout_secs=300)


@pytest.fixture(scope="module")
def two(four, directory) -> list[dict[str, Any]]:
    return run_processes(
        scenario_of_two, 2, str(directory), devices=4, timeout_secs=300
    )


def test_rows_are_gathered_along_one_axis_in_the_order_of_ranks(four):
    """With the values of verl's test_tensor_dict.py::test_all_gather_data_proto."""
    for rank, gathered in enumerate(each["gathered"] for each in four):
        if rank % 2 == 0:
            assert gathered["obs"] == [[0, 1], [0, 1], [2, 5], [6, 9]]
            assert gathered["labels"] == ["a", "b", "a", "b"]
        else:
            assert gathered["obs"] == [[1, 3], [3, 5], [3, 7], [9, 13]]
            assert gathered["labels"] == ["b", "a", "b", "a"]
        assert gathered["lengths"] == [rank % 2, 1, rank % 2 + 2, 1]
        assert gathered["meta"] == {"info": f"of {rank}"}


def test_metrics_are_gathered_in_the_order_of_ranks(four):
    """With the values of verl's test_torch_functional.py."""
    for each in four:
        assert each["metrics"] == {
            "loss": [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]],
            "grad_norm": [0, 1, 2, 3],
            "odd": [1, 1],
        }


def test_entropy_of_a_vocabulary_split_over_two_processes(four):
    """As verl's test_tensor_dict.py::test_vocab_parallel_entropy, 256 x 155,136."""
    for each in four:
        assert each["entropy"]["values"] < 1.3e-6
        assert each["entropy"]["grads"] < 1e-5
        assert each["entropy"]["logits"] == 0.0


@pytest.mark.parametrize("name", training.STRATEGIES)
def test_every_strategy_trains_and_evaluates_as_one_process_does(four, name):
    expected = training.train(name)
    for each in four:
        found = each["training"][name]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        np.testing.assert_allclose(
            found["weights"], expected["weights"], rtol=1e-4, atol=1e-6
        )
    assert expected["losses"][0] > 1.01 * expected["losses"][-1]  # it did train


def test_a_step_after_a_load_is_the_same_to_the_bit_with_a_scheduler(four):
    """As verl's test_fsdp_ckpt.py: A, save, B, load, B again."""
    (found,) = {str(each["checkpoint"]) for each in four}
    checkpoint = four[0]["checkpoint"]
    for name, (once, again) in checkpoint.items():
        assert once == again, name
    assert checkpoint["saved"] != checkpoint["after"], found


def test_two_processes_go_on_where_four_have_saved(four, two):
    for each in two:
        assert each["restored"]["found"] == four[0]["checkpoint"]["saved"][0]
        expected = four[0]["checkpoint"]["losses"][0]
        assert each["restored"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_text_is_evaluated_as_by_one_process(two, directory):
    expected = evaluate_text(str(directory))
    assert expected["tokens"] == 299
    for each in two:
        assert each["evaluated"] == pytest.approx(expected, rel=1e-5)


def test_of_an_uneven_tail_no_row_is_lost_and_none_is_made_up(four):
    tails = [each["tail"] for each in four]
    assert [tail["mine"] for tail in tails] == [
        [16, 17, 18, 19],
        [20, 21, 22, 23],
        [24, 25, 26],
        [],
    ]
    real = [[True] * 2] * 2
    assert [tail["mask"] for tail in tails] == [
        real,
        real,
        [[True, True], [True, False]],
        [[False] * 2] * 2,
    ]
    assert {tail["sum"] for tail in tails} == {sum(range(16, 27))}
    assert [tail["shard"] for tail in tails] == [[rank, 4] for rank in range(4)]


# Import and export

TOTAL = sum(tensor.nbytes for tensor in random_tensors(np.float32).values())


@pytest.mark.parametrize("way", ["replicated", "first dim", "last dim"])
def test_each_byte_is_read_once_a_job(two, way):
    read = [each["import"]["read"][way] for each in two]
    assert sum(read) == TOTAL
    # Rows go to devices in even parts, which 131 of them are not quite.
    assert max(read) <= 0.52 * TOTAL


def test_the_first_process_writes_what_all_hold(two, directory):
    assert_same_bytes(tensors_of(directory / "out"), random_tensors(np.float32))


def test_all_processes_learn_that_one_failed(two):
    told = [each["import"]["told"] for each in two]
    names = [[line.partition(":")[0] for line in lines] for lines in told]
    saved = ["OSError", "RuntimeError", "ValueError"]
    assert names[0] == [*saved, "RuntimeError", "RuntimeError", "TimeoutError"]
    saved = ["RuntimeError", "OSError", "RuntimeError"]
    assert names[1] == [*saved, "ValueError", "ValueError", "OSError"]
    assert "Processes [0] failed" in told[1][0]
    assert "it exists" in told[0][2]
    assert "ended" in told[1][3]
    assert "Processes [1] of 2 did not come within 1 s" in told[0][5]


def test_a_failure_of_any_process_leaves_nothing(two, directory):
    assert sorted(os.listdir(directory)) == ["llama", "out", "run"]
