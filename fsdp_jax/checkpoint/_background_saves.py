"""Saves in the background through Orbax's manager, one at a time; failures are kept."""

from __future__ import annotations

import contextlib
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    BestN,
    PreservationPolicy,
    SaveDecisionPolicy,
)

from fsdp_jax.checkpoint._lease import take_lease
from fsdp_jax.checkpoint._multihost import LostProcessError, gather, together
from fsdp_jax.checkpoint._orbax_handler import (
    StateHandler,
    manager,
    raise_failure,
    remove_unfinished,
)
from fsdp_jax.checkpoint._save import Beside, check_save, prepare
from fsdp_jax.training._state import TrainState


class NotSavedError(RuntimeError):
    """An asynchronous save failed, e.g. because of a full disk or a lost process."""


class BackgroundSaves:
    """Saves of a run to its directory; all processes must call every method alike.

    Attributes:
      present: Step that was saved or loaded last; None if that failed.
      failure: Step and error of the last save, if it failed.
    """

    def __init__(
        self,
        path: Path,
        save: SaveDecisionPolicy | None,
        keep: PreservationPolicy | None,
        timeout_secs: int,
    ):
        """Takes the lease of a directory.

        Args:
          path: Directory of the run.
          save: Policy of steps to save; None to save at each call.
          keep: Policy of steps to keep; None to keep all.
          timeout_secs: Seconds after which a save has failed, and after which a process
            that does not answer is lost.

        Raises:
          ValueError: If another writer has the lease, or `keep` ranks steps by metrics.
        """
        _refuse_metrics(keep)
        self.present: int | None = None
        self.failure: tuple[int, Exception] | None = None
        self._path = path
        self._policies = save, keep
        self._timeout_secs = timeout_secs
        self._saving: int | None = None
        self._handler = StateHandler(timeout_secs)
        self._stack = ExitStack()
        self._lease = take_lease(path)
        self._stack.callback(self.release)

    def release(self) -> None:
        """Gives the lease back."""
        if self._lease is not None:
            self._lease.release()

    def close(self) -> None:
        """Closes the manager, which waits for its save, and gives the lease back."""
        self._stack.close()

    def open(self) -> None:
        """Removes unfinished saves, and opens Orbax's manager."""
        save, keep = self._policies
        remove_unfinished(self._path)
        every = ocp.checkpoint_managers.FixedIntervalPolicy(1)
        self._manager: Any = self._stack.enter_context(
            manager(
                self._path,
                self._handler,
                save_decision_policy=save or every,
                preservation_policy=keep,
                async_options=ocp.AsyncOptions(
                    timeout_secs=self._timeout_secs,
                    # Else writers wait forever for a folder that cannot be made. With
                    # several processes they must not: see `_check_can_be_made`.
                    create_directories_asynchronously=jax.process_count() > 1,
                ),
            )
        )

    def is_due(self, step: int) -> bool:
        """Returns whether the policy says to save a step."""
        return self._manager.should_save(step)

    def must_stop(self) -> bool:
        """Returns whether all processes are to stop; to be called once a step."""
        return self._manager.must_stop()

    def newest(self) -> int | None:
        """Returns the newest step that the manager knows of."""
        return self._manager.latest_step()

    def reload(self) -> None:
        """Lets the manager look at the steps again."""
        self._manager.reload()

    def start(self, step: int, state: TrainState, beside: Beside) -> bool:
        """Starts a save; returns whether it runs, else its failure is kept."""
        # Reports a lost process by rank; Orbax would wait for it forever.
        gather("Saving", lambda: None, self._timeout_secs)
        self.settle()
        self.failure, self._saving, self.present = None, None, None
        try:
            with together("Saving", self._timeout_secs):
                if self._lease is not None:
                    self._lease.check()
            checked = check_save(step, state, beside)
            arguments = prepare(self._path, step, checked)
            self._begin(step, arguments)
        except OSError as error:
            # Of one process, a failure like one in the background: training goes on.
            if jax.process_count() > 1:
                raise
            self._fail(step, error)
            return False
        self._saving = self.present = step
        return True

    def _begin(self, step: int, arguments: Any) -> None:
        try:
            self._manager.save(step, args=arguments, force=True)
        except OSError:
            raise
        except Exception:
            # Reports a process lost during the save; jax only sees a broken connection.
            gather("Saving", lambda: None, self._timeout_secs)
            raise

    def settle(self) -> None:
        """Waits for the running save; keeps its error, which Orbax raises later."""
        step, self._saving = self._saving, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            raise_failure(self._handler, self._path / str(step))
        except LostProcessError:
            raise
        except Exception as error:
            self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        """Keeps the error of a save, and lets the same step be saved again."""
        self.failure, self.present = (step, error), None
        with contextlib.suppress(OSError):  # The directory itself may be gone.
            # Drops the failed step from Orbax's cached list of steps.
            self._manager.reload()
        logging.getLogger("fsdp_jax").error("Step %d is not saved: %s", step, error)


def _refuse_metrics(policy: PreservationPolicy | None) -> None:
    """Refuses policies that rank by metrics, which our saves do not pass to Orbax."""
    inner = getattr(policy, "policies", ())
    if isinstance(policy, BestN):
        raise ValueError(
            f"Checkpointer(preservation_policy=BestN(n={policy.n})): steps are saved "
            "without metrics, so that BestN has nothing to rank them by and would keep "
            "all, or none. Use fsdp_jax.checkpoint.KeepBest, which ranks them by a "
            "number in their metadata, or LatestN(n)."
        )
    for one in inner:
        _refuse_metrics(one)
