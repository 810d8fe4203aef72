"""Checkpoints of a training loop: in the background, by policy, and before the end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    BestN,
    PreservationPolicy,
    SaveDecisionPolicy,
)

from fsdp_jax._local_path import check_local
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._assets import Files, load_files
from fsdp_jax.checkpoint._load import load, load_metadata
from fsdp_jax.checkpoint._multihost import LostProcessError, gather
from fsdp_jax.checkpoint._objects import Extra
from fsdp_jax.checkpoint._orbax_handler import (
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
)
from fsdp_jax.checkpoint._save import Beside, prepare
from fsdp_jax.checkpoint._steps import (
    Step,
    committed_steps,
    latest_step,
    resolve_step,
)
from fsdp_jax.checkpoint.local._store import LocalCheckpoints, LocalStore
from fsdp_jax.training._state import TrainState

_KILLED_BY_SIGTERM = 128 + signal.SIGTERM


class NotSavedError(RuntimeError):
    """A save in the background failed: a full disk, a lost process."""


class Checkpointer:
    """Saves while training goes on, and where it stopped the next start goes on.

    ```
    with fsdp.Checkpointer(path) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(plan, tx))
        if state is None:
            state = fsdp.init(plan, tx, params)
        for number in range(int(state.step) + 1, num_steps + 1):
            state, metrics = step(state, next(batches))
            checkpointer.save(number, state)
    ```

    A save copies the state to the host and returns; writing goes on behind. One save
    is under way at a time, the next waits for it: so besides the state it takes as much
    memory as the shards of this host once more, and no more.

    With `local` steps are saved to the disks of the hosts as well, more often: see
    `LocalCheckpoints`.

    After SIGTERM the next `save` saves whatever the policy says, waits until the step
    is committed, and raises `SystemExit(143)`. Of several processes it is enough that
    one gets the signal: jax's preemption service tells all of them at which step, about
    a second later. For that `save` must be called after every step.
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
        """Opens a directory; what an earlier run left there unfinished is removed.

        Args:
          path: The directory of the run; made if missing.
          save_decision_policy: Which steps to save, e.g. Orbax's
            `FixedIntervalPolicy(100)`; None: each that is given.
          preservation_policy: Which steps to keep, e.g. Orbax's `LatestN(3)`; None:
            all.
          local: Also saves to the disks of the hosts; None: does not.
          timeout_secs: After so long a save has failed, and a process that does not
            answer is given up.

        Raises:
          ValueError: If `local` does not fit the job, or `preservation_policy` ranks
            steps by metrics, as `BestN` does: steps are saved without any.
        """
        _refuse_metrics(preservation_policy)
        check_local(path)
        remove_unfinished(Path(path))
        self._path = path
        self._timeout_secs = timeout_secs
        self._local = None if local is None else LocalStore(local, path, timeout_secs)
        # Of the step that was resumed.
        self._metadata: Callable[[], dict[str, Any]] | None = None
        self._files: Callable[[str], Path] | None = None
        # Of the last save and the last local one, each by its step.
        self._failure: tuple[int, Exception] | None = None
        self._local_failure: tuple[int, Exception] | None = None
        self._saving: int | None = None
        self._terminated = threading.Event()
        self._handler = StateHandler(timeout_secs)
        self._stack = ExitStack()
        every = ocp.checkpoint_managers.FixedIntervalPolicy(1)
        self._manager = self._stack.enter_context(
            manager(
                path,
                self._handler,
                save_decision_policy=save_decision_policy or every,
                preservation_policy=preservation_policy,
                async_options=ocp.AsyncOptions(timeout_secs=timeout_secs),
            )
        )

    def __enter__(self) -> Checkpointer:
        # With more processes the handler is jax's: one alone must not stop.
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
            before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._stack.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # Of several processes one that failed must not wait for what others report.
        if kind is None or jax.process_count() == 1:
            self._settle_locally()
            self._settle()
        try:
            self._stack.close()
        except Exception as failure:
            if kind is None:
                raise
            # It must not take the place of the error that it comes of.
            logging.getLogger("fsdp_jax").error("On closing: %s", failure)
        if kind is None:
            self._raise_failure()

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What the step was saved with that `resume` loaded; None if it loaded none."""
        return None if self._metadata is None else self._metadata()

    def files(self, name: str) -> Path:
        """Where the files lie that the step carries that `resume` loaded.

        Args:
          name: As in the `files` of `save`.

        Returns:
          The folder within the step, to read from; of a local step on this host.

        Raises:
          ValueError: If it loaded none, or one that carries no such files.
        """
        if self._files is None:
            raise ValueError(f"No step is loaded, of which to take files {name!r}.")
        return self._files(name)

    def resume(
        self,
        mould: PyTree,
        *,
        step: Step = None,
        extras: Mapping[str, Extra] | None = None,
    ) -> Any:
        """Loads the newest step, or returns None where there is none yet.

        Local or not, the newer wins; of the same step the local one, which is nearer.
        A local step is complete if all that the mould asks for is on one of the hosts
        at least: on another mesh or number of processes too. What a host lacks or has
        damaged comes from a peer; where none has it, the local step is passed over,
        and the log says what is missing.

        Args:
          mould: As for `load`.
          step: As for `load`; with `"latest-good"` a damaged step is passed over.
          extras: As for `load`.

        Raises:
          ValueError: As for `load`.
          DamagedCheckpointError: As for `load`.
        """
        first = jax.process_index() == 0
        found = gather(
            "Loading",
            lambda: self._find(step) if first else None,
            self._timeout_secs,
        )[0]
        if self._local is not None:
            steps = _local_steps(step, found)
            restored = self._local.load(mould, extras or {}, steps)
            if restored is not None:
                self._metadata, self._files = lambda: restored.metadata, restored.find
                return restored.state
        if found is None and not isinstance(step, int):
            return None
        step = step if found is None else found
        state = load(self._path, mould, step=step, extras=extras)
        self._metadata = functools.partial(load_metadata, self._path, step=step)
        self._files = functools.partial(load_files, self._path, step=step)
        return state

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        metadata: dict[str, Any] | None = None,
        extras: Mapping[str, Extra] | None = None,
        files: Mapping[str, Files] | None = None,
    ) -> bool:
        """Saves if the policy or `local` says so; returns when `state` may be donated.

        An earlier save that failed is logged, and does not keep this one from being
        made; `wait` and the end of the `with` block raise it if it was the last.

        Args:
          step: `state.step`, which to read would wait for the device at every step.
          state: What to save.
          metadata: As for `save`.
          extras: As for `save`; asked for their states before this returns.
          files: As for `save`; copied behind. A local step reads them at once.

        Returns:
          Whether it saves.

        Raises:
          ValueError: As for `save`, or if `step` is not that of the state.
          LostProcessError: If another process hangs or is gone.
          SystemExit: After SIGTERM, once the step is committed.
        """
        stop = self._terminated.is_set() or self._manager.reached_preemption(step)
        if stop and latest_step(self._path) == step:
            raise SystemExit(_KILLED_BY_SIGTERM)
        persistent = stop or self._manager.should_save(step)
        local = not stop and self._local is not None and self._local.is_due(step)
        if not persistent and not local:
            return False
        if step != int(state.step):
            raise ValueError(
                f"save({step}, state): the state's own step is {state.step}."
            )
        beside = Beside(metadata, extras, files)
        if local:
            self._save_locally(step, state, beside)
        if persistent:
            self._start(step, state, beside)
        if stop:
            self.wait()
            raise SystemExit(_KILLED_BY_SIGTERM)
        return True

    def wait(self) -> None:
        """Returns when the last saves are committed.

        Raises:
          NotSavedError: If one failed; its cause says why.
        """
        self._settle_locally()
        self._settle()
        self._raise_failure()

    def _find(self, step: Step) -> int | None:
        """The step that is asked for, or the newest, of those that are not local."""
        steps = committed_steps(self._path)
        if isinstance(step, int):
            return step if step in steps else None
        return resolve_step(self._path, step) if steps else None

    def _save_locally(self, step: int, state: TrainState, beside: Beside) -> None:
        assert self._local is not None
        self._settle_locally()
        self._local.save(step, state, beside)
        self._local_failure = None

    def _start(self, step: int, state: TrainState, beside: Beside) -> None:
        # Who hangs or is gone is named here; Orbax would wait for it.
        gather("Saving", lambda: None, self._timeout_secs)
        self._settle()
        arguments = prepare(self._path, step, state, beside)
        self._failure, self._saving = None, step
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception:
            # Of a process that ended on the way jax knows but that a connection broke.
            gather("Saving", lambda: None, self._timeout_secs)
            raise

    def _settle(self) -> None:
        """Waits for the save under way, and keeps its error: Orbax raises it later."""
        step, self._saving = self._saving, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            raise_failure(self._handler, Path(self._path) / str(step))
        except LostProcessError:
            raise
        except Exception as error:
            self._failure = step, error
            self._manager.reload()
            logging.getLogger("fsdp_jax").error("Step %d is not saved: %s", step, error)

    def _settle_locally(self) -> None:
        """The same for the local save under way."""
        if self._local is not None:
            self._local_failure = self._local.settle() or self._local_failure

    def _raise_failure(self) -> None:
        failures = {"Step": self._failure, "Local step": self._local_failure}
        self._failure = self._local_failure = None
        for what, failure in failures.items():
            if failure is not None:
                step, error = failure
                raise NotSavedError(f"{what} {step} is not saved: {error}") from error

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()


def _refuse_metrics(policy: PreservationPolicy | None) -> None:
    """Refuses to rank steps by metrics, which a save does not give to Orbax."""
    inner = getattr(policy, "policies", ())
    if isinstance(policy, BestN):
        raise ValueError(
            f"Checkpointer(preservation_policy=BestN(n={policy.n})): steps are saved "
            "without metrics, so that BestN has nothing to rank them by and would keep "
            "all, or none. Use LatestN(n), and save each step that is the best so far "
            "to a directory of its own with fsdp_jax.save(path, state)."
        )
    for one in inner:
        _refuse_metrics(one)


def _local_steps(step: Step, found: int | None) -> range:
    """Which local steps will do: none older than the one found elsewhere."""
    if isinstance(step, int):
        return range(step, step + 1 if found is None else step)
    return range(found or 0, sys.maxsize)
