"""Checkpoints of a training loop: in the background, by policy, and before the end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    PreservationPolicy,
    SaveDecisionPolicy,
)

from fsdp_jax._state import TrainState
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._engine import (
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
)
from fsdp_jax.checkpoint._extras import Extra
from fsdp_jax.checkpoint._files import Files
from fsdp_jax.checkpoint._load import load
from fsdp_jax.checkpoint._save import Beside, prepare
from fsdp_jax.checkpoint._steps import Step, latest_step

_KILLED_BY_SIGTERM = 128 + signal.SIGTERM


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

    After SIGTERM the next `save` saves whatever the policy says, waits until the step
    is committed, and raises `SystemExit(143)`. With more than one process jax tells all
    of them at which step, if `jax.distributed` was started with its preemption service.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        timeout_secs: int = 600,
    ):
        """Opens a directory; what an earlier run left there unfinished is removed.

        Args:
          path: The directory of the run; made if missing.
          save_decision_policy: Which steps to save, e.g. Orbax's
            `FixedIntervalPolicy(100)`; None: each that is given.
          preservation_policy: Which steps to keep, e.g. Orbax's `LatestN(3)`; None:
            all.
          timeout_secs: After so long a save has failed.
        """
        remove_unfinished(Path(path))
        self._path = path
        self._failure: tuple[int, Exception] | None = None
        self._saving: int | None = None
        self._terminated = threading.Event()
        self._handler = StateHandler()
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
            self._settle()
        self._stack.close()
        if kind is None:
            self._raise_failure()

    def resume(
        self,
        mould: PyTree,
        *,
        step: Step = None,
        extras: Mapping[str, Extra] | None = None,
    ) -> Any:
        """Loads the newest step, or returns None where there is none yet.

        Args:
          mould: As for `load`.
          step: As for `load`; with `"latest-good"` a damaged step is passed over.
          extras: As for `load`.

        Raises:
          ValueError: As for `load`.
          DamagedCheckpointError: As for `load`.
        """
        if step is None or step == "latest-good":
            if latest_step(self._path) is None:
                return None
        return load(self._path, mould, step=step, extras=extras)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        metadata: dict[str, Any] | None = None,
        extras: Mapping[str, Extra] | None = None,
        files: Mapping[str, Files] | None = None,
    ) -> bool:
        """Saves if the policy says so; returns when `state` may be donated.

        An earlier save that failed is logged, and does not keep this one from being
        made; `wait` and the end of the `with` block raise it if it was the last.

        Args:
          step: `state.step`, which to read would wait for the device at every step.
          state: What to save.
          metadata: As for `save`.
          extras: As for `save`; asked for their states before this returns.
          files: As for `save`; copied behind.

        Returns:
          Whether it saves.

        Raises:
          ValueError: As for `save`, or if `step` is not that of the state.
          SystemExit: After SIGTERM, once the step is committed.
        """
        stop = self._terminated.is_set() or self._manager.reached_preemption(step)
        if stop and latest_step(self._path) == step:
            raise SystemExit(_KILLED_BY_SIGTERM)
        if not stop and not self._manager.should_save(step):
            return False
        if step != int(state.step):
            raise ValueError(
                f"save({step}, state): the state's own step is {state.step}."
            )
        self._start(step, state, Beside(metadata, extras, files))
        if stop:
            self.wait()
            raise SystemExit(_KILLED_BY_SIGTERM)
        return True

    def wait(self) -> None:
        """Returns when the last save is committed.

        Raises:
          RuntimeError: If it failed; its cause says why.
        """
        self._settle()
        self._raise_failure()

    def _start(self, step: int, state: TrainState, beside: Beside) -> None:
        self._settle()
        arguments = prepare(self._path, step, state, beside)
        self._failure, self._saving = None, step
        self._manager.save(step, args=arguments, force=True)

    def _settle(self) -> None:
        """Waits for the save under way, and keeps its error: Orbax raises it later."""
        step, self._saving = self._saving, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            raise_failure(self._handler, Path(self._path) / str(step))
        except Exception as error:
            self._failure = step, error
            self._manager.reload()
            logging.getLogger("fsdp_jax").error("Step %d is not saved: %s", step, error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            step, error = self._failure
            self._failure = None
            raise RuntimeError(f"Step {step} is not saved: {error}") from error

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()
