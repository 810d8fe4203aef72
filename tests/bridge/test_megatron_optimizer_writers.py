"""Optimizer state is written as Megatron wrote it, and comes back bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import facts

from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import read_torch_file
from bridge.megatron import (
    MegatronCheckpoint,
    MegatronOptimizer,
    open_megatron,
    plain_args,
    write_megatron,
)
from bridge.megatron.read._dcp import open_dcp

FORMATS = "optimizer_formats"
# The settings of the goldens' runs that their args do not hold.
BUCKETS = {"ddp_bucket_size": 1500, "overlap_grad_reduce": True}
DENSE = {"tp": 2}, {"data_parallel_size": 2, **BUCKETS}
EXPERTS = {"pp": 2, "ep": 2}, {"data_parallel_size": 2, **BUCKETS}


def optimizer_of(run: MegatronCheckpoint) -> MegatronOptimizer:
    assert run.optimizer is not None, run.left_out
    return run.optimizer


def settings_of(run: MegatronCheckpoint, **changed: Any) -> dict[str, Any]:
    return {**plain_args(run.args)[0], "make_vocab_size_divisible_by": 1, **changed}


def write(path: Path, run: MegatronCheckpoint, args=None, **options: Any) -> Path:
    """Writes a run with its optimizer, and returns the directory of the iteration."""
    write_megatron(
        path,
        run.source,
        settings_of(run, **(args or {})),
        optimizer=optimizer_of(run),
        scheduler=run.scheduler,
        iteration=7,
        **options,
    )
    return path / "iter_0000007"


def assert_same(found: Source, expected: Source) -> None:
    assert set(found.keys()) == set(expected.keys())
    for key in expected.keys():
        assert found.dtype(key) == expected.dtype(key), key
        assert found.shape(key) == expected.shape(key), key
        assert found.read(key).tobytes() == expected.read(key).tobytes(), key


def assert_same_state(found: MegatronCheckpoint, run: MegatronCheckpoint) -> None:
    """Asserts that moments, master weights, steps and settings are the same."""
    ours, theirs = optimizer_of(found), optimizer_of(run)
    assert_same(ours.exp_avg, theirs.exp_avg)
    assert_same(ours.exp_avg_sq, theirs.exp_avg_sq)
    if theirs.master is not None and ours.master is not None:
        assert_same(ours.master, theirs.master)
    assert ours.step == theirs.step
    assert settings(ours) == settings(theirs)
    assert found.scheduler == run.scheduler


def settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """The groups of dense weights, without what a format adds to them.

    Those of experts are the same, where expert parallelism makes them.
    """
    kept = [
        {k: v for k, v in g.items() if k not in ("params", "step", "bias_correction")}
        for g in optimizer.param_groups
        if not g["is_expert_parallel"]
    ]
    return sorted(kept, key=lambda g: -g["wd_mult"])


RUNS = [
    ("qwen3", "torch_dist"),
    ("mixtral", "torch_dist"),
    *(
        (FORMATS, f"{model}/{kind}")
        for model in ("dense", "experts")
        for kind in ("dp_reshardable", "fully_reshardable", "legacy", "torch_dist")
    ),
]
TARGETS = {
    "by name": {"optimizer_format": "fully_reshardable"},
    "plain": {"optimizer_format": "plain"},
    "buckets": {"optimizer_format": "dp_reshardable", "tp": 2, "pp": 2},
    "buckets, virtual": {"optimizer_format": "dp_reshardable", "vpp": 2},
    "legacy": {"format": "legacy", "optimizer_format": "plain", "tp": 2, "pp": 2},
    "legacy, distributed": {"format": "legacy", "tp": 2, "pp": 2},
    "fsdp": {"format": "fsdp_dtensor"},
}


# Every run once, and every format from dense weights and from experts.
GRID = [
    ("qwen3", "torch_dist", "buckets"),
    ("mixtral", "torch_dist", "fsdp"),
    (FORMATS, "dense/dp_reshardable", "legacy, distributed"),
    (FORMATS, "dense/fully_reshardable", "legacy"),
    (FORMATS, "dense/legacy", "fsdp"),
    (FORMATS, "dense/torch_dist", "by name"),
    (FORMATS, "experts/dp_reshardable", "buckets, virtual"),
    (FORMATS, "experts/fully_reshardable", "plain"),
    (FORMATS, "experts/legacy", "by name"),
    (FORMATS, "experts/torch_dist", "legacy, distributed"),
]
REST = [(*run, target) for run in RUNS for target in TARGETS]


@pytest.mark.parametrize(
    "name, kind, target",
    GRID + [pytest.param(*c, marks=pytest.mark.long) for c in REST if c not in GRID],
)
def test_every_run_comes_back_from_every_format(golden, tmp_path, name, kind, target):
    run = open_megatron(golden(name) / kind)
    args = {"data_parallel_size": 2, **BUCKETS, "use_distributed_optimizer": True}
    found = open_megatron(write(tmp_path / "out", run, args, **TARGETS[target]))
    assert_same_state(found, run)
    assert (found.iteration, optimizer_of(found).step) == (7, optimizer_of(run).step)
    if target == "fsdp":  # it holds the weights that the optimizer updates
        assert_same(found.source, optimizer_of(run).master or run.source)
    else:
        assert_same(found.source, run.source)


@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"ep": 4, "tp": 2}], ids=str)
@pytest.mark.parametrize("format", ["torch_dist", "legacy"])
def test_experts_are_found_on_the_ranks_that_hold_them(golden, tmp_path, format, sizes):
    run = open_megatron(golden(FORMATS) / "experts/torch_dist")
    args = {"data_parallel_size": 4, **BUCKETS}
    flat = "dp_reshardable" if format == "torch_dist" else "distributed"
    options = {"format": format, "optimizer_format": flat, **sizes}
    assert_same_state(open_megatron(write(tmp_path / "out", run, args, **options)), run)


@pytest.mark.parametrize("model, run_of", [("dense", DENSE), ("experts", EXPERTS)])
def test_buckets_are_cut_where_megatron_cut_them(golden, tmp_path, model, run_of):
    """Same keys, same chunks, and the same bits at each parameter."""
    sizes, args = run_of
    run = open_megatron(golden(FORMATS) / model / "dp_reshardable")
    options = {"optimizer_format": "dp_reshardable", **sizes}
    ours = open_dcp(write(tmp_path / "out", run, args, **options))
    theirs = open_dcp(run.path)
    flat = {key for key in theirs.tensors if ".bucket_idx_" in key}
    assert len(flat) > 10
    assert {key for key in ours.tensors if ".bucket_idx_" in key} == flat
    for key in flat:
        boxes = [
            sorted(t.box for t in each[key].tiles)
            for each in (ours.tensors, theirs.tensors)
        ]
        assert boxes[0] == boxes[1], key
    items = {
        key
        for key in theirs.items
        if key.split("/")[0].endswith(
            ("per_bucket_numel", "per_bucket_numel_unpadded", "optimizer")
        )
    }
    assert items and items <= set(ours.items)
    for key in items:
        assert ours.items[key]() == theirs.items[key](), key
    assert_same_state(open_megatron(tmp_path / "out"), run)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_legacy_parameters_are_numbered_as_megatron_numbered_them(
    golden, tmp_path, model
):
    run = open_megatron(golden(FORMATS) / model / "legacy")
    sizes = {"tp": 2, "pp": 2} if model == "dense" else {"pp": 2, "ep": 2}
    options = {"format": "legacy", "optimizer_format": "plain", **sizes}
    ours = write(tmp_path / "out", run, **options)
    files = sorted(run.path.rglob("*.pt"))
    assert len(files) == 4
    for file in files:
        expected = read_torch_file(file)
        found = read_torch_file(ours / file.relative_to(run.path))
        assert list(found["model"]) == [
            k for k in expected["model"] if "extra" not in k
        ]
        assert values(found["optimizer"]) == values(expected["optimizer"])


def values(tree: Any) -> Any:
    """A tree with the bits of its tensors."""
    if isinstance(tree, LazyTensor):
        return tree.shape, str(tree.dtype), tree.read().tobytes()
    if isinstance(tree, dict):
        return {key: values(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [values(value) for value in tree]
    return tree


@pytest.mark.parametrize(
    "name, kind, format",
    [
        ("qwen3", "torch_dist", "fully_reshardable"),
        ("mixtral", "torch_dist", "plain"),
        (FORMATS, "experts/fully_reshardable", "fully_reshardable"),
        (FORMATS, "dense/torch_dist", "plain"),
    ],
)
def test_named_state_is_written_as_megatron_wrote_it(
    golden, tmp_path, name, kind, format
):
    run = open_megatron(golden(name) / kind)
    ours = write(tmp_path / "out", run, optimizer_format=format)
    found, expected = open_dcp(ours).tensors, open_dcp(run.path).tensors
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].read().tobytes() == tensor.read().tobytes(), key
    common = [read_torch_file(path / "common.pt") for path in (ours, run.path)]
    assert values(common[0]["optimizer"]) == values(common[1]["optimizer"])


def test_a_run_of_transformer_engines_adam_counts_in_its_groups(golden, tmp_path):
    run = open_megatron(golden(FORMATS) / "dense/torch_dist")
    groups = [
        {k: v for k, v in g.items() if k != "amsgrad"} | {"bias_correction": True}
        for g in optimizer_of(run).param_groups
    ]
    fused = dataclasses.replace(optimizer_of(run), param_groups=tuple(groups), step=9)
    run = dataclasses.replace(run, optimizer=fused)
    for format in ("torch_dist", "legacy"):
        out = write(tmp_path / format, run, format=format, optimizer_format="plain")
        assert optimizer_of(open_megatron(out)).step == 9
        (file,) = {*out.rglob("common.pt"), *out.rglob("model_optim_rng.pt")}
        inner = read_torch_file(file)["optimizer"]["optimizer"]
        assert [group["step"] for group in inner["param_groups"]] == [9, 9]
        assert not any(
            "step" in str(key) or "step" in value
            for key, value in inner["state"].items()
        )


def test_shared_embeddings_have_a_bucket_of_their_own_on_both_stages(golden, tmp_path):
    run = open_megatron(golden("qwen3") / "torch_dist")  # tied
    args = {
        "data_parallel_size": 2,
        "ddp_bucket_size": 10**6,
        "overlap_grad_reduce": True,
    }
    out = write(tmp_path / "out", run, args, optimizer_format="dp_reshardable", pp=2)
    keys = [key for key in open_dcp(out).tensors if key.endswith(".param")]
    assert len(keys) == 4
    assert_same_state(open_megatron(out), run)


@pytest.mark.parametrize(
    "change, facts_of",
    [
        ({"step": None}, ("steps",)),
        ({"param_groups": ()}, ("0", "1")),
        ({"exp_avg": "fewer"}, ("exp_avg", "output_layer.weight")),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_is_written(
    golden, tmp_path, change, facts_of
):
    run = open_megatron(golden(FORMATS) / "dense/torch_dist")
    if "exp_avg" in change:
        whole = optimizer_of(run).exp_avg
        assert isinstance(whole, TensorSource)
        tensors = {k: v for k, v in whole.tensors.items() if k != "output_layer.weight"}
        change = {"exp_avg": dataclasses.replace(whole, tensors=tensors)}
    changed = dataclasses.replace(optimizer_of(run), **change)
    with pytest.raises(ValueError, match=facts(*facts_of)):
        write(tmp_path / "out", dataclasses.replace(run, optimizer=changed))
    assert not (tmp_path / "out").exists()


def test_a_form_of_another_format_is_refused(golden, tmp_path):
    run = open_megatron(golden(FORMATS) / "dense/torch_dist")
    with pytest.raises(
        ValueError, match=facts("legacy", "'dp_reshardable'", "'plain'")
    ):
        write(tmp_path / "out", run, format="legacy", optimizer_format="dp_reshardable")
    with pytest.raises(ValueError, match=facts("optimizer_format", "'plain'")):
        write_megatron(
            tmp_path / "out", run.source, settings_of(run), optimizer_format="plain"
        )
    with pytest.raises(ValueError, match=facts("fsdp_dtensor", "TP 2")):
        write(tmp_path / "out", run, format="fsdp_dtensor", tp=2)


def test_other_buckets_than_the_run_had_are_noticed(golden, tmp_path):
    run = open_megatron(golden(FORMATS) / "dense/torch_dist")
    out = write(tmp_path / "out", run, BUCKETS, format="legacy", tp=2)
    for file in out.rglob("model_optim_rng.pt"):
        args = read_torch_file(file)["args"]
        assert args["ddp_bucket_size"] == 1500
    found = open_megatron(out)
    assert_same_state(found, run)
    assert np.all(optimizer_of(found).exp_avg_sq.read("output_layer.weight") >= 0)
