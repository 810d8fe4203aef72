"""One tensor of a checkpoint, printed."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import numpy as np

import bridge
import bridge.pytorch
import fsdp_jax as fsdp

_KINDS = ("exp_avg", "exp_avg_sq", "master")


def print_tensor(path: Path, name: str, *, as_json: bool) -> None:
    """Prints the shape, dtype, statistics and values of one tensor.

    Args:
      path: Checkpoint of Hugging Face, Megatron or verl.
      name: Name of the tensor; of Adam's state, after its kind and a slash.
      as_json: Prints one JSON object, with the first and last values alone.

    Raises:
      ValueError: If there is no such tensor; similar names are given.
    """
    sources = _sources(path)
    kind, _, key = name.rpartition("/")
    source = sources.get(kind)
    if source is None or key not in source.keys():
        names = [f"{k}/{n}".lstrip("/") for k, s in sources.items() for n in s.keys()]
        near = difflib.get_close_matches(name, names) or names[:3]
        raise ValueError(f"'{path}' has no tensor '{name}'; it has {', '.join(near)}.")
    values = source.read(key)
    exact = values.astype(np.float64) if values.size else values
    found = {
        "name": name,
        "shape": list(values.shape),
        "dtype": str(values.dtype),
        **{k: float(f(exact)) for k, f in _STATISTICS.items() if values.size},
        "not_finite": int((~np.isfinite(exact)).sum()),
    }
    if as_json:
        flat = exact.reshape(-1)
        ends = {"first": flat[:3].tolist(), "last": flat[-3:].tolist()}
        print(json.dumps(found | ends))
        return
    for label, value in found.items():
        print(f"{label}: {value}")
    print(np.array2string(exact, precision=6, threshold=100))


_STATISTICS = {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}


def _sources(path: Path) -> dict[str, bridge.Source]:
    """Returns the weights, under an empty name, and Adam's state by kind."""
    if bridge.megatron.is_megatron(path):
        run = bridge.megatron.open_megatron(path)
        held = {kind: getattr(run.optimizer, kind, None) for kind in _KINDS}
        return {"": run.source} | {k: s for k, s in held.items() if s is not None}
    if bridge.pytorch.is_verl(path):
        shards = bridge.pytorch.open_verl(path)
        held = {kind: getattr(shards.optimizer, kind, None) for kind in _KINDS}
        return {"": shards.source} | {k: s for k, s in held.items() if s is not None}
    if fsdp.latest_step(path) is not None:
        raise ValueError(
            f"--tensor: '{path}' is a checkpoint of fsdp-jax, whose arrays are read by "
            "fsdp.load. Write it as a file of weights first: fsdp-jax export."
        )
    return {"": bridge.open_checkpoint(path)}
