"""Moments in flat buckets are found again, weight by weight, or refused."""

import dataclasses
import itertools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.errors import facts

from bridge.formats._torch_writer import TorchWriter
from bridge.megatron import open_megatron
from bridge.megatron.buffers import ParamSpec, distributed_optimizer_layout
from bridge.megatron.write._dcp import DcpWriter

BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = ("param", "exp_avg", "exp_avg_sq")
V, H, F, L, QKV, PROJ, E = 24, 8, 12, 4, 16, 8, 4

# What each layer's modules register, in their order, and how ranks cut it.
ATTENTION = [
    ("self_attention.linear_qkv.layer_norm_weight", (H,), None),
    ("self_attention.linear_proj.weight", (H, PROJ), 1),
    ("self_attention.linear_qkv.weight", (QKV, H), 0),
    ("self_attention.linear_qkv.bias", (QKV,), 0),
]
DENSE = [
    ("mlp.linear_fc1.layer_norm_weight", (H,), None),
    ("mlp.linear_fc1.weight", (2 * F, H), "gated"),
    ("mlp.linear_fc2.weight", (H, F), 1),
]
EXPERTS = [
    ("pre_mlp_layernorm.weight", (H,), None),
    ("mlp.router.weight", (E, H), None),
    *(
        (f"mlp.experts.{e}.linear_{fc}.weight", shape, cut)
        for e in range(E)
        for fc, shape, cut in (("fc1", (2 * F, H), "gated"), ("fc2", (H, F), 1))
    ),
]


def model_params(experts: bool) -> list[tuple[str, tuple[int, ...], object]]:
    """All parameters in the order of Megatron's own modules (local spec)."""
    layer = ATTENTION + (EXPERTS if experts else DENSE)
    return [
        ("embedding.word_embeddings.weight", (V, H), 0),
        *(
            (f"decoder.layers.{i}.{name}", shape, cut)
            for i in range(L)
            for name, shape, cut in layer
        ),
        ("decoder.final_layernorm.weight", (H,), None),
        ("output_layer.weight", (V, H), 0),
    ]


def cut_for(values: np.ndarray, cut: object, tp: int) -> list[np.ndarray]:
    if cut is None:
        return [values] * tp
    if cut == "gated":
        gate, up = np.split(values, 2)
        halves = zip(np.split(gate, tp), np.split(up, tp), strict=True)
        return [np.concatenate(pair) for pair in halves]
    return np.split(values, tp, axis=int(str(cut)))


def expert_of(name: str) -> int | None:
    return int(name.split("experts.")[1].split(".")[0]) if "experts." in name else None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's sizes, and what is odd about it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    bucket_size: int | None = None
    experts: bool = False
    tied: bool = False
    swapped: bool = False  # two norms, of one shape, have changed places

    def params(self):
        params = model_params(self.experts)
        return params[:-1] if self.tied else params

    def args(self) -> dict[str, object]:
        return {
            "num_layers": L,
            "num_experts": E if self.experts else None,
            "swiglu": True,
            "transformer_impl": "local",
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp,
        }

    def dense(self, stage: int):
        """What a stage's dense optimizer holds, in order."""
        local = [p for p in self.params() if stage_of(p[0], self.pp) == stage]
        local = [p for p in local if self.ep == 1 or expert_of(p[0]) is None]
        if self.tied and self.pp > 1 and stage == self.pp - 1:
            local.append(("embedding.word_embeddings.weight", (V, H), 0))
        if self.swapped:
            a, b = [n for n, p in enumerate(local) if p[1] == (H,)][:2]
            local[a], local[b] = local[b], local[a]
        return local

    def sparse(self, stage: int, rank: int):
        """What a stage's optimizer of experts holds, in order."""
        of_rank = range(rank * E // self.ep, (rank + 1) * E // self.ep)
        local = [p for p in self.params() if stage_of(p[0], self.pp) == stage]
        return [p for p in local if expert_of(p[0]) in of_rank]


def write_run(directory: Path, run: Run) -> dict[str, dict[str, np.ndarray]]:
    """Writes a run as Megatron's dp_reshardable does; returns what it should give."""
    random = np.random.default_rng(0)
    states = {
        kind: {n: random.normal(size=s).astype(np.float32) for n, s, _ in run.params()}
        for kind in KINDS
    }
    with DcpWriter(directory) as writer:
        for name, values in states["param"].items():
            writer.add(name, (0,) * values.ndim, values.astype(BF16))
        for stage, t in itertools.product(range(run.pp), range(run.tp)):
            group = f"chained_0.optimizer.distributed.dp_group_idx_{stage * run.tp + t}"
            write_buffer(writer, group, run.dense(stage), states, t, run)
            for rank in range(run.ep if run.experts and run.ep > 1 else 0):
                number = (stage * run.ep + rank) * run.tp + t
                group = f"chained_1.optimizer.distributed.dp_group_idx_{number}"
                write_buffer(writer, group, run.sparse(stage, rank), states, t, run)
        writer.finish()
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    write_common(directory, run.args())
    return states


def write_common(directory: Path, args: dict[str, object]) -> None:
    with (directory / "common.pt").open("wb") as stream, TorchWriter(stream) as out:
        out.finish({"args": args})


def stage_of(name: str, pp: int) -> int:
    if name.startswith("embedding."):
        return 0
    parts = name.split(".")
    return int(parts[2]) // (L // pp) if parts[1] == "layers" else pp - 1


def write_buffer(writer, group: str, local, states, t: int, run: Run) -> None:
    """Lays a rank's parameters out with the project's own oracle of Megatron's layout,
    and writes each piece that a data rank holds, and each gap, as a chunk.
    """
    parts = {
        kind: {n: cut_for(states[kind][n], cut, run.tp)[t] for n, _, cut in local}
        for kind in KINDS
    }
    specs = [ParamSpec(n, parts["param"][n].shape) for n, _, _ in local]
    layout = distributed_optimizer_layout(specs, run.dp, run.bucket_size)
    for number, bucket in enumerate(layout.buckets):
        places = [p for p in layout.placements if p.bucket == number]
        shard = bucket.num_elements // run.dp
        ends = {0, bucket.num_unpadded, *range(0, bucket.num_unpadded, shard)}
        ends |= {end - bucket.start for p in places for end in (p.start, p.stop)}
        for kind in KINDS:
            flat = np.full(bucket.num_unpadded, np.nan, np.float32)
            for p in places:
                values = parts[kind][p.param.name].reshape(-1)
                flat[p.start - bucket.start : p.stop - bucket.start] = values
            full = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            for start, stop in itertools.pairwise(sorted(ends)):
                chunk = f"{full}.bucket_idx_{number}.{kind}"
                writer.add(chunk, (start,), flat[start:stop])


GRID = [
    Run(tp, pp, dp=dp, bucket_size=size)
    for tp, pp, dp, size in itertools.product((1, 2), (1, 2), (1, 3), (None, 300))
]
GRID += [
    Run(tp, pp=2, ep=ep, dp=2, experts=True)
    for ep, tp in ((1, 1), (2, 1), (2, 2), (4, 2))
]
GRID += [Run(tp=2, pp=2, tied=True), Run(tied=True)]


@pytest.mark.parametrize("run", GRID, ids=str)
def test_moments_are_found_weight_by_weight(tmp_path, run):
    states = write_run(tmp_path, run)
    found = open_megatron(tmp_path)
    assert found.left_out == ()
    optimizer = found.optimizer
    assert optimizer is not None
    sources = (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq)
    for kind, source in zip(KINDS, sources, strict=True):
        assert source is not None
        assert set(source.keys()) == set(states[kind]) == set(found.source.keys())
        for name, values in states[kind].items():
            assert source.shape(name) == values.shape
            np.testing.assert_array_equal(source.read(name), values, err_msg=name)
            index = (slice(1, values.shape[0] - 1),)
            np.testing.assert_array_equal(source.read(name, index), values[index])


def test_weights_in_another_order_than_worked_out_are_never_returned(tmp_path):
    """Norms that changed places fit every chunk; their master weights do not."""
    write_run(tmp_path, Run(swapped=True))
    optimizer = open_megatron(tmp_path).optimizer
    assert optimizer is not None
    with pytest.raises(
        ValueError, match=facts("0.16", "--dist-ckpt-optim-fully-reshardable")
    ):
        for name in optimizer.exp_avg.keys():
            optimizer.exp_avg.read(name)


@pytest.mark.parametrize(
    "changed, reason",
    [
        (
            {"pipeline_model_parallel_size": 2},
            "'decoder.layers.1.mlp.linear_fc2.weight'",
        ),
        ({"tensor_model_parallel_size": 2}, "'output_layer.weight'"),
        (
            {"decoder_first_pipeline_num_layers": 1},
            "['decoder_first_pipeline_num_layers']",
        ),
        ({"transformer_impl": "transformer_engine"}, "linear_qkv.layer_norm_weight'"),
    ],
)
def test_buckets_that_do_not_fit_the_settings_are_left_out_with_the_reason(
    tmp_path, changed, reason
):
    write_run(tmp_path, Run())
    write_common(tmp_path, {**Run().args(), **changed})
    found = open_megatron(tmp_path)
    if found.optimizer is None:
        assert "flat buckets are not understood" in found.left_out[0]
        assert re.search(facts(reason), found.left_out[0])
    else:  # every chunk fits: the weights themselves tell
        with pytest.raises(ValueError, match=facts(reason)):
            for name in found.optimizer.exp_avg.keys():
                found.optimizer.exp_avg.read(name)
    assert found.source.shape("output_layer.weight") == (V, H)


FORMATS = [("dp_reshardable", "fully_reshardable"), ("legacy", "torch_dist")]


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("nameless, named", FORMATS)
def test_state_without_names_is_what_megatron_wrote_with_them(
    golden, model, nameless, named
):
    runs = golden("optimizer_formats") / model
    flat = open_megatron(runs / nameless).optimizer
    whole = open_megatron(runs / named).optimizer
    assert flat is not None and whole is not None
    assert flat.step == whole.step == 2
    assert len(flat.param_groups) == len(whole.param_groups) == 2 + (model == "experts")
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found, expected = getattr(flat, kind), getattr(whole, kind)
        assert set(found.keys()) == set(expected.keys())
        for key in found.keys():
            assert found.read(key).tobytes() == expected.read(key).tobytes(), key


def test_state_that_megatron_saved_under_the_wrong_weights_is_refused(golden):
    """It gathers buckets without the padding between them, and cuts as if with it."""
    run = golden("optimizer_formats") / "dense/fully_reshardable_several_buckets"
    optimizer = open_megatron(run).optimizer
    assert optimizer is not None
    right, wrong = [], []
    for key in optimizer.exp_avg.keys():
        try:
            optimizer.exp_avg.read(key)
            right.append(key)
        except ValueError as error:
            assert "do not round to the model's" in str(error)
            wrong.append(key)
    assert "output_layer.weight" in right  # of the first bucket
    assert "embedding.word_embeddings.weight" in wrong  # of the last
