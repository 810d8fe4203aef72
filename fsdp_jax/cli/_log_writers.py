"""Metrics for TensorBoard, Weights & Biases, MLflow and trackio.

Each is its own package, imported only if a run asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.cli._errors import check_creatable
from fsdp_jax.cli._metrics import StepMetrics

Numbers = Mapping[str, float]
Write = Callable[[int, Numbers], None]


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """Facts of a run for its log writers.

    Attributes:
      name: Name of the run: that of its directory.
      id: Identifier that later starts of the same run have too.
      start: Number of steps done before.
      options: Options of the run, by section.
    """

    name: str
    id: str
    start: int
    options: Mapping[str, Any]


def logged_run(save: Any, start: int, options: Mapping[str, Any]) -> LoggedRun:
    """Describes a run to writers.

    Args:
      save: Directory of its checkpoints, from `as_path`.
      start: Number of steps done before.
      options: Options of the run, by section.
    """
    path = save.absolute()
    digest = hashlib.sha256(str(path).encode()).hexdigest()
    return LoggedRun(path.name, digest[:16], start, options)


@contextlib.contextmanager
def _tensorboard(where: str, run: LoggedRun) -> Iterator[Write]:
    from tensorboardX import SummaryWriter

    # Steps after the start are made again: TensorBoard is told to drop their points.
    with SummaryWriter(where, purge_step=run.start + 1) as writer:
        writer.add_text("options", f"```\n{_as_text(run.options)}\n```", run.start)

        def write(step: int, numbers: Numbers) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)
            writer.flush()

        yield write


@contextlib.contextmanager
def _wandb(where: str, run: LoggedRun) -> Iterator[Write]:
    wandb = importlib.import_module("wandb")
    with wandb.init(
        project=where,
        name=run.name,
        id=run.id,
        resume="allow",
        config=dict(run.options),
    ) as logged:
        yield lambda step, numbers: logged.log(dict(numbers), step=step)


@contextlib.contextmanager
def _mlflow(where: str, run: LoggedRun) -> Iterator[Write]:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(where)
    found = mlflow.search_runs(
        filter_string=f"tags.fsdp_jax = '{run.id}'", output_format="list"
    )
    earlier = found[0].info.run_id if found else None
    with mlflow.start_run(run_id=earlier, run_name=run.name):
        if earlier is None:
            mlflow.set_tag("fsdp_jax", run.id)
        mlflow.log_dict(dict(run.options), "run.yaml")
        yield lambda step, numbers: mlflow.log_metrics(dict(numbers), step=step)


@contextlib.contextmanager
def _trackio(where: str, run: LoggedRun) -> Iterator[Write]:
    trackio = importlib.import_module("trackio")
    logged = trackio.init(
        project=where, name=run.name, config=dict(run.options), resume="allow"
    )
    try:
        yield lambda step, numbers: logged.log(dict(numbers), step=step)
    finally:
        trackio.finish()


_WRITERS = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _mlflow),
    "trackio": ("trackio", _trackio),
}


def check_writers(names: Sequence[str]) -> None:
    """Raises a `ValueError` for writers that there are not, or not here.

    Args:
      names: Values of `--log-to`.
    """
    wrong = []
    for name in names:
        kind, colon, where = name.partition(":")
        if kind not in _WRITERS or not colon or not where:
            wrong.append(
                f"--log-to {name}: give tensorboard:DIR, wandb:PROJECT, "
                "mlflow:EXPERIMENT or trackio:PROJECT"
            )
        elif importlib.util.find_spec(package := _WRITERS[kind][0]) is None:
            wrong.append(f"--log-to {name} needs the package: pip install {package}")
        elif kind == "tensorboard" and "://" not in where:
            check_creatable(Path(where), f"--log-to {name}:")
    if wrong:
        raise ValueError("; ".join(wrong) + ".")


@contextlib.contextmanager
def open_writers(
    names: Sequence[str], run: LoggedRun
) -> Iterator[Callable[[StepMetrics], None]]:
    """Opens writers, in process 0 alone.

    Args:
      names: Values of `--log-to`.
      run: The run.

    Yields:
      Function that writes the metrics of a step.
    """
    with contextlib.ExitStack() as stack:
        writes = []
        if jax.process_index() == 0:  # The metrics of all processes are the same.
            for name in names:
                kind, _, where = name.partition(":")
                writes.append(stack.enter_context(_WRITERS[kind][1](where, run)))

        def write(metrics: StepMetrics) -> None:
            numbers = metrics.as_dict()
            step = int(numbers.pop("step"))
            for each in writes:
                each(step, numbers)

        yield write


def _as_text(options: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in options.items())
