"""A GPT's checkpoint is one of a hybrid model, with a layer for each sub-block."""

import re

import numpy as np
import pytest
from helpers.errors import facts

from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.megatron import open_megatron, plain_args, to_gpt, to_hybrid, write_megatron
from bridge.megatron._hybrid import HybridLayers
from bridge.megatron.read._dcp import open_dcp

HIDDEN, HEADS, WIDTH, STATE = 16, 4, 32, 8
# Rows of a Mamba 2 mixer: of z, x, B, C and dt; of x, B and C.
IN_PROJ = {"z": WIDTH, "x": WIDTH, "B": STATE, "C": STATE, "dt": HEADS}
CONV = {"x": WIDTH, "B": STATE, "C": STATE}


@pytest.fixture(params=["dense", "experts"])
def run(request, golden):
    return open_megatron(golden("optimizer_formats") / request.param / "torch_dist")


def mlp_of(run) -> str:
    return "E" if run.args["num_experts"] else "-"


def mixer(number: int) -> dict[str, np.ndarray]:
    """Weights of one of Megatron's Mamba layers, with TransformerEngine's norm."""
    random = np.random.default_rng(number)
    at = f"decoder.layers.{number}.mixer."
    shapes = {
        "in_proj.layer_norm_weight": (HIDDEN,),
        "in_proj.weight": (sum(IN_PROJ.values()), HIDDEN),
        "conv1d.weight": (sum(CONV.values()), 1, 4),
        "conv1d.bias": (sum(CONV.values()),),
        "A_log": (HEADS,),
        "D": (HEADS,),
        "dt_bias": (HEADS,),
        "norm.weight": (WIDTH,),
        "out_proj.weight": (HIDDEN, WIDTH),
    }
    return {
        at + name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def source_of(arrays: dict[str, np.ndarray]) -> Source:
    return TensorSource("fresh", {k: Held(v) for k, v in arrays.items()})


class Held:
    """An array as a lazy tensor."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, slices=()):
        return self.array[slices]


def write(path, run, **options):
    args = {**plain_args(run.args)[0], "make_vocab_size_divisible_by": 1}
    write_megatron(path, run.source, args, optimizer=run.optimizer, **options)
    return open_megatron(path)


def assert_same(found: Source, expected: Source) -> None:
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():
        assert found.read(key).tobytes() == expected.read(key).tobytes(), key


def assert_same_run(found, run) -> None:
    assert_same(found.source, run.source)
    assert_same(found.optimizer.exp_avg, run.optimizer.exp_avg)
    assert_same(found.optimizer.exp_avg_sq, run.optimizer.exp_avg_sq)
    assert found.optimizer.step == run.optimizer.step
    assert found.args["num_layers"] == run.args["num_layers"]


def hybrid_of(run):
    """The run as a hybrid model with a layer of Mamba before each attention."""
    fresh = source_of({**mixer(0), **mixer(3)})
    return to_hybrid(run, f"M*{mlp_of(run)}|M*{mlp_of(run)}", fresh)


def test_positions_are_paired_in_the_pattern_s_order():
    assert HybridLayers.of("M*-M*-") == HybridLayers((1, 4), (2, 5), (0, 3))
    assert HybridLayers.of("**|--") == HybridLayers((0, 1), (2, 3), ())
    assert HybridLayers.of("*E*E") == HybridLayers((0, 2), (1, 3), ())


@pytest.mark.parametrize(
    "pattern, wrong",
    [
        ("", ("0", "(*)", "E")),
        ("M*-/*-", ("'/'",)),
        ("G*-", ("'G'",)),
        ("*-*E", ("(-)", "(E)")),
        ("**-", ("2", "1", "(*)", "E")),
    ],
)
def test_patterns_that_no_gpt_equals_are_refused(pattern, wrong):
    with pytest.raises(ValueError, match=facts(*wrong)):
        HybridLayers.of(pattern)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_format": "fully_reshardable"},
        {"optimizer_format": "plain"},
        {"format": "fsdp_dtensor"},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_a_gpt_goes_to_a_hybrid_model_and_back(run, tmp_path, options):
    written = write(tmp_path / "hybrid", hybrid_of(run), **options)
    assert written.args["num_layers"] == 6
    key = "decoder.layers.3.mixer.in_proj.weight"
    assert written.source.read(key).tobytes() == mixer(3)[key].tobytes()
    assert not written.optimizer.exp_avg.read(key).any()
    back = to_gpt(written)
    assert "[0, 3]" in back.left_out[-1]
    if "format" in options:  # it holds the weights that the optimizer updates
        assert_same(back.source, run.optimizer.master)
    else:
        assert_same_run(write(tmp_path / "gpt", back, **options), run)


def test_attention_and_mlp_of_a_layer_have_layers_of_their_own(run, tmp_path):
    write(tmp_path, hybrid_of(run))
    keys = open_dcp(tmp_path / "release").tensors
    layers: dict[int, set[str]] = {}
    for key in keys:
        if match := re.match(r"decoder\.layers\.(\d+)\.(\w+)\.", key):
            layers.setdefault(int(match[1]), set()).add(match[2])
    # Local layers' norms are modules beside the sub-block.
    norms = {"input_layernorm", "pre_mlp_layernorm"}
    kinds = {number: names - norms for number, names in layers.items()}
    assert kinds == dict(enumerate([{"mixer"}, {"self_attention"}, {"mlp"}] * 2))
    assert "decoder.final_norm.weight" in keys
    assert not any(key.startswith("decoder.final_layernorm") for key in keys)


def test_parts_of_a_mixer_are_apart_in_torch_dist_and_joined_when_read(run, tmp_path):
    write(tmp_path, hybrid_of(run))
    tensors = open_dcp(tmp_path / "release").tensors
    at = "decoder.layers.0.mixer."
    for name, parts in (("in_proj.weight", IN_PROJ), ("conv1d.bias", CONV)):
        expected = np.split(mixer(0)[at + name], np.cumsum(list(parts.values()))[:-1])
        for part, array in zip(parts, expected, strict=True):
            found = tensors[f"{at}{name}.{part}"].read()
            assert found.tobytes() == array.tobytes()
        assert at + name not in tensors


def test_layers_of_mamba_need_weights_and_no_others_are_taken(run):
    pattern = f"M*{mlp_of(run)}" * 2
    with pytest.raises(ValueError, match=facts("[]", "[0, 3]")):
        to_hybrid(run, pattern)
    with pytest.raises(ValueError, match=facts("[0, 1]", "[0, 3]")):
        to_hybrid(run, pattern, source_of({**mixer(0), **mixer(1)}))


def test_other_numbers_of_layers_and_files_of_ranks_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match=facts("2", "3")):
        to_hybrid(run, f"*{mlp_of(run)}" * 3)
    hybrid = to_hybrid(run, f"*{mlp_of(run)}" * 2)
    with pytest.raises(ValueError, match=facts("hybrid", "already")):
        to_hybrid(hybrid, f"*{mlp_of(run)}" * 2)
    with pytest.raises(ValueError, match=facts("hybrid", "args")):
        to_gpt(run)
    with pytest.raises(ValueError, match=facts("distributed", "hybrid_layer_pattern")):
        write(tmp_path / "out", hybrid, format="legacy")
    assert not (tmp_path / "out").exists()
