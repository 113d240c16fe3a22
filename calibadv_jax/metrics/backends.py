"""Backends of metrics beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Prometheus."""

from __future__ import annotations

import importlib
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from calibadv_jax.config import LogConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError, one_line
from calibadv_jax.core.files import wrap_disk_errors, write_text
from calibadv_jax.metrics.catalogue import find

MLFLOW_BATCH = 1000  # values that it takes at once


class MetricsBackend(ABC):
    """Receives the finite values of every step."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:  # noqa: B027 services keep the newest value of a step
        """Prepare for writing the steps from `step` on again."""

    @abstractmethod
    def close(self) -> None: ...


def open_backends(
    log: LogConfig, directory: Path, start_step: int | None, warn: Callable[[str], object] = lambda _: None
) -> list[MetricsBackend]:
    """Open the backends that log.backends names; services call the run by the name of its `directory`.

    An earlier attempt may have written `start_step`, the first step that will be written. `warn` is called
    when a service has gone. Raises UserError if a package is missing or a service cannot be used.
    """
    kinds: dict[str, Callable[[], MetricsBackend]] = {
        "tensorboard": lambda: TensorBoard(directory, start_step),
        "wandb": lambda: WeightsAndBiases(log, directory),
        "mlflow": lambda: MLflow(log, directory, warn),
        "prometheus": lambda: Prometheus(log),
    }
    return [kinds[name]() for name in log.backends]


class TensorBoard(MetricsBackend):
    """Event files in ``<directory>/tensorboard``.

    The caller's thread writes them: the thread of tensorboardX' SummaryWriter dies on a full disk, and its
    queue then blocks the run.
    """

    def __init__(self, directory: Path, start_step: int | None) -> None:
        # It imports torch where there is one, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._writer, self._event, self._scalar = EventsWriter, Event, scalar
        self._begin = SessionLog(status=SessionLog.START)
        self._folder, self._files = directory / "tensorboard", 0
        self._open(start_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with wrap_disk_errors(self._folder):
            for name, value in values.items():
                self._add(step, summary=self._scalar(name, value))
            self._events.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        with wrap_disk_errors(self._folder):
            self._events.close()

    def _open(self, purge_step: int | None) -> None:
        # A file's name says the second; without the count a second file of that second would replace it.
        self._files += 1
        with wrap_disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._events = self._writer(str(self._folder / "events"), filename_suffix=f".{self._files}")
            if purge_step is not None:
                self._add(purge_step, session_log=self._begin)
            self._events.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases(MetricsBackend):
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the folder, for ``wandb sync``.

    A resumed run is continued. Its values stand over ``step``, so that steps written again replace the curve.
    """

    def __init__(self, log: LogConfig, directory: Path) -> None:
        wandb = _package("wandb", "wandb")
        path = directory / "wandb_run_id"
        place = {"name": directory.name, "dir": str(directory), "id": _kept_id(path)}
        try:
            self._run = wandb.init(project=log.project, resume="allow", **place)
        except wandb.errors.Error as error:
            fault = f"no Weights & Biases ({one_line(error)})"
            raise UserError(f"log.backends: {fault}; log in, or set WANDB_MODE=offline") from error
        write_text(path, self._run.id)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow(MetricsBackend):
    """A run of the MLflow experiment log.project, at MLFLOW_TRACKING_URI; a resumed run is continued.

    A server that goes away does not end the run: the values that it missed are sent after a later step.
    """

    def __init__(self, log: LogConfig, directory: Path, warn: Callable[[str], object]) -> None:
        mlflow = _package("mlflow", "mlflow-skinny")
        self._error, self._metric = mlflow.exceptions.MlflowException, mlflow.entities.Metric
        path = directory / "mlflow_run_id"
        try:
            self._client = client = mlflow.MlflowClient()
            if not _kept_id(path):
                experiment = client.get_experiment_by_name(log.project)
                number = experiment.experiment_id if experiment else client.create_experiment(log.project)
                write_text(path, client.create_run(number, run_name=directory.name).info.run_id)
            self._run_id = client.get_run(_kept_id(path)).info.run_id
        except self._error as error:
            fault = f"log.backends: no MLflow: {one_line(error)}; set MLFLOW_TRACKING_URI"
            raise EnvironmentFailure(fault) from error
        self._warn, self._is_away = warn, False
        self._unsent: list[Any] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        for name, value in values.items():
            plain = re.sub(r"[^\w\-.:/ ]", "_", name)  # MLflow takes no other characters
            self._unsent.append(self._metric(plain, float(value), now, step))
        try:
            self._send()
        except self._error as error:
            if not self._is_away:
                advice = "metrics.jsonl has them, and they are sent again after the next step"
                self._warn(f"log.backends: MLflow does not take metrics ({one_line(error)}); {advice}")
            self._is_away = True

    def _send(self) -> None:
        while self._unsent:
            self._client.log_batch(self._run_id, metrics=self._unsent[:MLFLOW_BATCH])
            del self._unsent[:MLFLOW_BATCH]
        self._is_away = False

    def close(self) -> None:
        try:
            self._send()
            self._client.set_terminated(self._run_id)
        except self._error as error:
            lacking = f"MLflow lacks {len(self._unsent)} values and the end of the run ({one_line(error)})"
            self._warn(f"log.backends: {lacking}; metrics.jsonl has all of them")


class Prometheus(MetricsBackend):
    """The newest step's values as gauges ``calibadv_<name>`` at http://HOST:PORT/metrics (log.prometheus)."""

    def __init__(self, log: LogConfig) -> None:
        client = _package("prometheus_client", "prometheus-client")
        self._family = _package("prometheus_client.core", "prometheus-client").GaugeMetricFamily
        self._values: dict[str, float] = {}
        registry = client.CollectorRegistry()
        registry.register(self)
        host, _, port = log.prometheus.rpartition(":")
        try:
            self._server, self._thread = client.start_http_server(int(port), host, registry)
        except (OSError, OverflowError) as error:  # the second: a port above 65535
            fault = f"no server there ({one_line(error)})"
            raise UserError(f"log.prometheus={log.prometheus}: {fault}; choose another port") from error

    def collect(self) -> Iterator[Any]:
        """Called by the server for every scrape."""
        used: Counter[str] = Counter()
        for name, value in self._values.items():
            metric = find(name)
            meaning = f"{metric.meaning} [{metric.unit}]" if metric else name
            gauge = "calibadv_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            used[gauge] += 1  # a/b and a_b: a scrape with one name twice is refused as a whole
            yield self._family(f"{gauge}_{used[gauge]}" if used[gauge] > 1 else gauge, meaning, value=value)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {"step": step, **values}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _kept_id(path: Path) -> str | None:
    """Return a service's id of this run, from a file of the run's folder."""
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"log.backends: {package} is not installed; pip install {package}") from error
