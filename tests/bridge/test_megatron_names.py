"""Chunks of any shape and names of every format become whole tensors of one naming."""

from pathlib import Path

import numpy as np
import pytest
from held import assert_equal
from helpers.errors import facts

from bridge.formats._torch_writer import TorchWriter
from bridge.megatron import open_megatron
from bridge.megatron.write._dcp import DcpWriter


def test_uneven_chunks_are_put_together(tmp_path: Path):
    values = np.arange(130 * 3, dtype=np.float32).reshape(130, 3)
    with DcpWriter(tmp_path) as writer:
        for start, stop in ((0, 44), (88, 130), (44, 88)):  # in any order
            writer.add("model.module.w", (start, 0), values[start:stop])
        writer.finish()
    found = open_megatron(tmp_path)
    assert (found.format, found.source.keys()) == ("dcp", ("w",))
    np.testing.assert_array_equal(found.source.read("w"), values)
    np.testing.assert_array_equal(
        found.source.read("w", (slice(40, 90), slice(1, 2))), values[40:90, 1:2]
    )


LAYER = "decoder.layers.0.mlp.linear_fc2.weight"
STACK = "decoder.layers.mlp.linear_fc2.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    "names, twice",
    [((LAYER, STACK), LAYER), ((STACK, LAYER), LAYER)]
    + [((FC1, f"{FC1}_w", f"{FC1}_v"), FC1), ((f"{FC1}_w", f"{FC1}_v", FC1), FC1)],
)
def test_a_tensor_that_is_stored_in_two_forms_is_refused(tmp_path, names, twice):
    with DcpWriter(tmp_path) as writer:
        for name in names:
            writer.add(f"model.module.{name}", (0,) * 3, np.zeros((3, 2, 4), "f4"))
        writer.finish()
    with pytest.raises(ValueError, match=facts(f"'{twice}'")):
        open_megatron(tmp_path).source.keys()


NAMES = {
    "model.module.module.decoder.layers.3.mlp.linear_fc1.weight_w": "gate",
    "model.module.module.decoder.layers.3.mlp.linear_fc1.weight_v": "up",
    "model.module.module.decoder.layers.3.mlp.experts.linear_fc1.weight7_w": "gate",
    "model.module.module.decoder.layers.3.mlp.experts.linear_fc1.weight7_v": "up",
    "optimizer.state.module.module.module.decoder.final_layernorm.weight.exp_avg": "m",
    "optimizer.state.module.module.module.decoder.final_layernorm.weight."
    "exp_avg_sq": "v",
    "optimizer.state.module.module.module.decoder.final_layernorm.weight.step": "step",
    "optimizer.param_to_group_meta.x.lr": "lr",
}


def test_fsdp_dtensor_names_become_canonical(tmp_path):
    gate, up = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    kinds = {"gate": gate, "up": up, "m": gate, "v": up}
    kinds |= {"step": np.float32(9), "lr": np.float32(0)}
    with DcpWriter(tmp_path) as writer:
        for key, kind in NAMES.items():
            writer.add(key, (0,) * np.ndim(kinds[kind]), np.asarray(kinds[kind]))
        writer.finish()
    found = open_megatron(tmp_path)
    both = np.concatenate([gate, up])
    assert_equal(
        found.source,
        {
            "decoder.layers.3.mlp.linear_fc1.weight": both,
            "decoder.layers.3.mlp.experts.7.linear_fc1.weight": both,
        },
    )
    assert found.optimizer is not None
    assert found.optimizer.step == 9
    assert_equal(found.optimizer.exp_avg, {"decoder.final_layernorm.weight": gate})
    assert "optimizer.param_to_group_meta.x.lr: of the opt" in found.left_out[0]


def test_unstacked_and_split_keys_of_torch_dist_become_canonical(tmp_path):
    """As `singleton_local_shards` writes them."""
    gate, up = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    layer = "decoder.layers.1.mlp"
    with DcpWriter(tmp_path) as writer:
        for half, values in (("w", gate), ("v", up)):
            key = f"{layer}.experts.experts.5.linear_fc1.weight_{half}"
            writer.add(key, (0, 0), values)
        writer.add("module.output_layer.weight", (0, 0), up)  # NeMo's prefix
        writer.finish()
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert_equal(
        open_megatron(tmp_path).source,
        {
            f"{layer}.experts.5.linear_fc1.weight": np.concatenate([gate, up]),
            "output_layer.weight": up,
        },
    )


def test_half_a_projection_is_refused(tmp_path):
    with DcpWriter(tmp_path) as writer:
        writer.add("model.mlp.linear_fc1.weight_w", (0,), np.ones(2, np.float32))
        writer.finish()
    with pytest.raises(ValueError, match=facts("'mlp.linear_fc1.weight_w'")):
        open_megatron(tmp_path)


def test_two_keys_of_one_name_are_refused(tmp_path):
    with DcpWriter(tmp_path) as writer:
        for key in ("model.w", "model.module.w"):
            writer.add(key, (0,), np.ones(2, np.float32))
        writer.finish()
    with pytest.raises(ValueError, match=facts("['w']")):
        open_megatron(tmp_path)


def test_moments_of_another_shape_than_the_weight_are_left_out(tmp_path):
    """Megatron-Core before 0.14 flattened them."""
    weight = np.ones((2, 3), np.float32)
    with DcpWriter(tmp_path) as writer:
        writer.add("output_layer.weight", (0, 0), weight)
        for kind in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{kind}.output_layer.weight"
            writer.add(key, (0,), weight.reshape(-1))
        writer.finish()
    found = open_megatron(tmp_path)
    assert found.optimizer is None
    assert "it has the shape (6,), not (2, 3)" in found.left_out[0]


def test_progress_that_megatron_bridge_keeps_apart_is_found(tmp_path):
    with DcpWriter(tmp_path) as writer:
        writer.add("output_layer.weight", (0, 0), np.ones((2, 3), np.float32))
        writer.finish()
    file = tmp_path / "train_state.pt"
    with file.open("wb") as stream, TorchWriter(stream) as out:
        numbers = {"step": 500, "consumed_train_samples": 120_000}
        out.finish({key: out.add(np.asarray(n)) for key, n in numbers.items()})
    found = open_megatron(tmp_path)
    assert (found.iteration, found.consumed_samples) == (500, 120_000)


@pytest.mark.parametrize("value", ["7", 7.5, [7]])
def test_progress_that_is_no_number_is_refused(tmp_path, value):
    with DcpWriter(tmp_path) as writer:
        writer.add("output_layer.weight", (0, 0), np.ones((2, 3), np.float32))
        writer.finish()
    file = tmp_path / "train_state.pt"
    with file.open("wb") as stream, TorchWriter(stream) as out:
        out.finish({"step": value})
    with pytest.raises(ValueError, match=facts(repr(value))):
        open_megatron(tmp_path)
