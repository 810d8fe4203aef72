"""Checkpoints of a training loop: asynchronous, by policy, and on SIGTERM."""

from __future__ import annotations

import functools
import logging
import operator
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from orbax.checkpoint.checkpoint_managers import (
    PreservationPolicy,
    SaveDecisionPolicy,
)

from fsdp_jax._option_types import is_whole
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._assets import Files, load_files
from fsdp_jax.checkpoint._background_saves import BackgroundSaves, NotSavedError
from fsdp_jax.checkpoint._load import load, load_metadata
from fsdp_jax.checkpoint._multihost import gather
from fsdp_jax.checkpoint._objects import Extra
from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._rollback import make_way
from fsdp_jax.checkpoint._save import Beside, check_free, savable_step
from fsdp_jax.checkpoint._steps import (
    Step,
    committed_steps,
    latest_step,
    resolve_step,
)
from fsdp_jax.checkpoint.local._store import LocalCheckpoints, LocalStore
from fsdp_jax.training._state import TrainState

_KILLED_BY_SIGTERM = 128 + signal.SIGTERM


class Checkpointer:
    """Saves in the background during training, and resumes from the newest step.

    ```
    with fsdp.Checkpointer(path) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(plan, tx))
        if state is None:
            state = fsdp.init_state(plan, tx, params)
        for number in range(int(state.step) + 1, num_steps + 1):
            state, metrics = step(state, next(batches))
            checkpointer.save(number, state)
    ```

    A save copies the state to the host and returns; writing continues in the
    background. The next save waits for the previous one, so that host memory holds at
    most one copy of the shards of this host.

    With `local`, steps are also saved to the disks of the hosts, more often: see
    `LocalCheckpoints`.

    After SIGTERM the next `save` saves whatever the policy says, waits until the step
    is committed, and raises `SystemExit(143)`. With several processes it is enough that
    one gets the signal: jax's preemption service tells all of them the step to stop at,
    about a second later. `save` must be called after every step for that.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> with fsdp.Checkpointer(path) as checkpointer:
      ...     checkpointer.save(0, state)
      True
      >>> with fsdp.Checkpointer(path) as checkpointer:
      ...     resumed = checkpointer.resume(fsdp.abstract_state(plan, tx))
      >>> int(resumed.step)
      0
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        local: LocalCheckpoints | None = None,
        timeout_secs: int = 600,
    ):
        """Opens a directory, and removes unfinished saves of earlier runs.

        Args:
          path: Directory of the run; created if missing.
          save_decision_policy: Policy of steps to save, e.g. Orbax's
            `FixedIntervalPolicy(100)`; None to save at each call.
          preservation_policy: Policy of steps to keep, e.g. Orbax's `LatestN(3)`; None
            to keep all.
          local: Options of saves to the disks of the hosts; None for no such saves.
          timeout_secs: Seconds after which a save has failed, and after which a process
            that does not answer is lost.

        Raises:
          ValueError: If another `Checkpointer`, `save` or `remove` is writing to
            `path`; it is named. If `local` does not fit the job, or
            `preservation_policy` ranks steps by metrics, as `BestN` does: steps are
            saved without metrics.
        """
        self._path = as_path(path)
        self._timeout_secs = timeout_secs
        # Access to the step that was resumed.
        self._metadata: Callable[[], dict[str, Any]] | None = None
        self._files: Callable[[str], Path] | None = None
        # Step and error of the last local save, if it failed.
        self._local_failure: tuple[int, Exception] | None = None
        # Step that `resume` loaded last, and whether the steps behind it are set aside.
        self._resumed: int | None = None
        self._way_is_made = False
        self._terminated = threading.Event()
        self._stack = ExitStack()
        policies = save_decision_policy, preservation_policy
        self._saves = BackgroundSaves(self._path, *policies, timeout_secs)
        self._stack.callback(self._saves.close)
        # Without a `with` block, the lease is released with this object.
        weakref.finalize(self, self._saves.release)
        try:
            self._local = (
                None if local is None else LocalStore(local, path, timeout_secs)
            )
            self._saves.open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpointer:
        # With several processes, jax's preemption service handles the signal: they
        # must stop at the same step.
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
            before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._stack.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # With several processes, one that failed must not wait for the others.
        if kind is None or jax.process_count() == 1:
            self._settle_locally()
            self._saves.settle()
        try:
            self._stack.close()
        except Exception as failure:
            if kind is None:
                raise
            # It must not replace the original error.
            logging.getLogger("fsdp_jax").error("On closing: %s", failure)
        if kind is None:
            self._raise_failure()

    @property
    def metadata(self) -> dict[str, Any] | None:
        """Metadata of the step that `resume` loaded; None if it loaded none."""
        return None if self._metadata is None else self._metadata()

    def files(self, name: str) -> Path:
        """Returns the folder of files in the step that `resume` loaded.

        Args:
          name: Name in the `files` of `save`.

        Returns:
          Folder inside the step, read only; of a local step, on this host.

        Raises:
          ValueError: If `resume` loaded no step, or one without files of that name.
        """
        if self._files is None:
            raise ValueError(
                f"files({name!r}): no step is loaded. Call `resume` first."
            )
        return self._files(name)

    def resume(
        self,
        like: PyTree,
        *,
        step: Step = None,
        extras: Mapping[str, Extra] | None = None,
    ) -> Any:
        """Loads the newest step, or returns None if there is none.

        Saves in the background are waited for: the last of them is the newest step.

        The newest step wins, local or not; for equal steps the local one, which is
        faster to read. A step requested by number is loaded from `path` if it is there,
        and from the local disks only otherwise. A local step is complete if the hosts
        together have all that `like` needs, also on another mesh or number of
        processes. Files that a host lacks or has damaged are copied from a peer. If no
        host has a file, the local step is skipped, and the log says what is missing.

        Steps that are newer than the loaded one are set aside by the first save after
        it: they keep their contents under other names, which the log says.

        Args:
          like: Abstract state, as for `load`.
          step: Step to load, as for `load`; `"latest-good"` skips damaged steps.
          extras: Objects whose state to restore, as for `load`.

        Returns:
          Loaded state, or None.

        Raises:
          ValueError: If the step does not fit `like`, as for `load`.
          DamagedCheckpointError: If the step is not as it was written.
        """
        self._settle_locally()
        self._saves.settle()
        first = jax.process_index() == 0
        found = gather(
            "Loading",
            lambda: self._find(step) if first else None,
            self._timeout_secs,
        )[0]
        if self._local is not None:
            steps = _local_steps(step, found)
            restored = self._local.load(like, extras or {}, steps)
            if restored is not None:
                self._metadata, self._files = lambda: restored.metadata, restored.find
                self._go_on_from(restored.step)
                return restored.state
        chosen = step if found is None else found
        if not isinstance(chosen, int):
            return None
        step = chosen
        state = load(self._path, like, step=step, extras=extras)
        self._metadata = functools.partial(load_metadata, self._path, step=step)
        self._files = functools.partial(load_files, self._path, step=step)
        self._go_on_from(step)
        return state

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        metadata: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        extras: Mapping[str, Extra] | None = None,
        files: Mapping[str, Files] | None = None,
    ) -> bool:
        """Saves if the policy or `local` says so; the state may be donated afterwards.

        The failure of an earlier save is logged and does not prevent this one; `wait`
        and the end of the `with` block raise it if it was the last save.

        The first save after `resume` loaded an older step sets the newer ones aside.

        Args:
          step: Number of the step, `state.step`; passed since reading it would wait for
            the device at every step.
          state: State to save.
          metadata: Metadata, as for `fsdp_jax.save`, or a function that returns it and
            is called only if the step is saved.
          extras: Objects to save, as for `fsdp_jax.save`; their states are read before
            this returns.
          files: Files to save, as for `fsdp_jax.save`; copied in the background, but
            read at once for a local step.

        Returns:
          Whether it saves; False if the policy does not say so, or this very step was
          just saved or loaded.

        Raises:
          ValueError: If the step cannot be saved, as for `fsdp_jax.save`, such as one
            before the newest that was not resumed from. If `step` is not `state.step`,
            or another process has begun to write to the directory.
          LostProcessError: If another process hangs or is gone.
          SystemExit: After SIGTERM, once the step is committed.
        """
        if not is_whole(step):
            raise ValueError(
                f"save({step!r}, state): it is no number of a step. Use an int."
            )
        step = operator.index(step)
        self._check_is_newest(step)
        stop = self._terminated.is_set() or self._saves.must_stop()
        if stop and latest_step(self._path) == step:
            raise SystemExit(_KILLED_BY_SIGTERM)
        persistent = stop or self._saves.is_due(step)
        local = not stop and self._local is not None and self._local.is_due(step)
        if not persistent and not local:
            return False
        if step != savable_step(state):
            raise ValueError(
                f"save({step}, state): the state's own step is {state.step}."
            )
        given = metadata() if callable(metadata) else metadata
        beside = Beside(given, extras, files)
        started = False
        if local:
            self._save_locally(step, state, beside)
        if persistent:
            started = self._saves.start(step, state, beside)
        if stop:
            self.wait()
            raise SystemExit(_KILLED_BY_SIGTERM)
        return local or started

    def wait(self) -> None:
        """Waits until the last saves are committed.

        Raises:
          NotSavedError: If one failed, with its error as the cause.
        """
        self._settle_locally()
        self._saves.settle()
        self._raise_failure()

    def _find(self, step: Step) -> int | None:
        """Returns the requested or newest persistent step; None if there is none."""
        steps = committed_steps(self._path)
        if isinstance(step, int):
            return step if step in steps else None
        return resolve_step(self._path, step) if steps else None

    def _go_on_from(self, step: int) -> None:
        """Notes the loaded step: what is newer no longer belongs to the run."""
        self._resumed = self._saves.present = step
        self._way_is_made = False

    def _check_is_newest(self, step: int) -> None:
        """Raises a `ValueError` unless `step` can be saved, or is saved already."""
        if not self._way_is_made:
            self._saves.settle()
            make_way(self._path, self._resumed)
            if self._local is not None:
                self._settle_locally()
                self._local.make_way(
                    step - 1 if self._resumed is None else self._resumed
                )
            self._saves.reload()
            self._way_is_made = True
        newest = self._saves.newest()
        if newest is not None and newest >= step and self._saves.present != step:
            check_free(self._path, step)

    def _save_locally(self, step: int, state: TrainState, beside: Beside) -> None:
        assert self._local is not None
        self._settle_locally()
        self._local.save(step, state, beside)
        self._local_failure = None

    def _settle_locally(self) -> None:
        """Waits for the running local save and keeps its error."""
        if self._local is not None:
            self._local_failure = self._local.settle() or self._local_failure

    def _raise_failure(self) -> None:
        failures = {"Step": self._saves.failure, "Local step": self._local_failure}
        self._saves.failure = self._local_failure = None
        for what, failure in failures.items():
            if failure is not None:
                step, error = failure
                raise NotSavedError(f"{what} {step} is not saved: {error}") from error

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()


def _local_steps(step: Step, found: int | None) -> range:
    """Returns the acceptable local steps.

    A step requested by number, if it is not persistent; else those from the newest
    persistent step `found` on.
    """
    if isinstance(step, int):
        return range(step, step + 1 if found is None else step)
    return range(found or 0, sys.maxsize)
