"""Log-probabilities of answers by the reference model of DPO, computed once a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange, together
from fsdp_jax.cli._data import FullBatches
from fsdp_jax.cli._document_data import DocumentData
from fsdp_jax.cli._log import say
from fsdp_jax.cli._model_source import Checkpoint
from fsdp_jax.cli._preference_loss import answer_log_probs
from fsdp_jax.cli._run import Run

REFERENCE = "reference"
"""Name of the reference's log-probabilities among the files of a step."""

_FILE = "fsdp-jax-reference.npz"


def reference_log_probs(
    plan: fsdp.Plan, state: fsdp.TrainState, pairs: Any, batch: int, *, fused: bool
) -> Float[np.ndarray, "pairs 2"]:
    """Computes the log-probability of all answers by the model of a state.

    Args:
      plan: Plan of the decoder.
      state: State that training starts from.
      pairs: `PairRows`.
      batch: Pairs of a global batch.
      fused: Whether logits are computed by chunks of the vocabulary.
    """
    forward = fsdp.make_forward(
        plan, lambda model, rows: answer_log_probs(model, rows, fused)[0]
    )
    shard = fsdp.host_shard(plan.mesh)
    found = []
    for rows in fsdp.HostBatches(FullBatches(pairs, batch), batch, shard):
        given = fsdp.global_batch(plan.mesh, rows, batch)
        sums = forward(state.params, given, model_state=state.model_state)
        found.append(multihost_utils.process_allgather(sums, tiled=True))
    return np.concatenate(found)[: len(pairs)].astype(np.float32)


def with_reference(
    data: DocumentData,
    parts: Sequence[Float[np.ndarray, "pairs 2"]],
) -> DocumentData:
    """Returns the data with the reference's log-probabilities in its rows.

    Args:
      data: Pairs.
      parts: Log-probabilities of each source.
    """
    sources: list[Any] = [
        dataclasses.replace(source, reference=part)
        for source, part in zip(data.sources, parts, strict=True)
    ]
    return dataclasses.replace(data, sources=tuple(sources))


def read_reference(
    folder: Path, sha256: str, command: str | None = None
) -> list[np.ndarray] | None:
    """Reads what `write_reference` wrote; None if it is not there, or of other data.

    Args:
      folder: Directory of the run, or the folder of the files of a step.
      sha256: Fingerprint of the data.
      command: Digest of the command, by another of which it is not taken; None for any,
        as of a step, which is of the run that goes on.
    """
    file = folder / _FILE
    if not file.is_file():
        return None
    with np.load(file) as stored:
        if str(stored["sha256"]) != sha256:
            return None
        if command is not None and str(stored.get("command")) != command:
            return None
        number = sum(name.startswith("source_") for name in stored.files)
        return [stored[f"source_{i}"] for i in range(number)]


def write_reference(
    folder: Path, sha256: str, parts: Sequence[np.ndarray], command: str = ""
) -> Path:
    """Writes log-probabilities for later starts of the run; in the first process.

    Args:
      folder: Directory of the run.
      sha256: Fingerprint of the data.
      parts: Log-probabilities of each source.
      command: Digest of the command that computed them.

    Returns:
      The file.
    """
    file = folder / _FILE
    with together("Writing the reference's log-probabilities"):
        if jax.process_index() == 0:
            named: dict[str, Any] = {f"source_{i}": x for i, x in enumerate(parts)}
            named |= {"sha256": np.asarray(sha256), "command": np.asarray(command)}
            folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part.npz")
            np.savez(part, **named)
            part.replace(file)
    return file


def add_reference(
    plan: fsdp.Plan,
    data: DocumentData,
    run: Run,
    resumed: Checkpoint | None,
    make_state: Callable[[], fsdp.TrainState],
    *,
    command: str,
    fused: bool,
) -> tuple[DocumentData, Run, Callable[[], fsdp.TrainState]]:
    """Adds the reference's log-probabilities to the data, and to what a step saves.

    They are those of the model that the run started from: of the step that is resumed,
    of an earlier start of this command in the same directory, or computed now.

    Args:
      plan: Plan of the decoder.
      data: Pairs.
      run: Run whose steps save them.
      resumed: Step to resume from; None for a new run.
      make_state: Makes the state that the run starts from.
      command: Digest of the command that starts.
      fused: Whether logits are computed by chunks of the vocabulary.

    Returns:
      Data, run, and what makes the state now.

    Raises:
      ValueError: If the step that is resumed has those of other data.
    """
    sha256, folder = run.metadata["data_sha256"], run.save
    if resumed is not None:
        folder = fsdp.checkpoint.load_files(resumed.path, REFERENCE, step=resumed.step)
    parts = read_reference(folder, sha256, command if resumed is None else None)
    if not all(exchange(parts is not None)):
        parts = None  # They are computed by all processes, or by none.
    if parts is None and resumed is not None:
        raise ValueError(
            f"Step {resumed.step} of '{resumed.path}' has the reference's "
            "log-probabilities of other --data. Give the same files in the same order."
        )
    if parts is None:
        state = make_state()
        say("computing the log-probabilities of the reference model")
        parts = [
            reference_log_probs(plan, state, source, run.data.batch, fused=fused)
            for source in data.sources
        ]
        make_state = functools.partial(_same, state)
    file = write_reference(run.save, sha256, parts, command)
    run = dataclasses.replace(run, files={**run.files, REFERENCE: [file]})
    return with_reference(data, parts), run, make_state


def _same(state: fsdp.TrainState) -> fsdp.TrainState:
    return state
