"""Backends of metrics beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Prometheus."""

from __future__ import annotations

import importlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibadv_jax.config import LogConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError, one_line
from calibadv_jax.core.files import wrap_disk_errors, write_text
from calibadv_jax.metrics.catalogue import find_metric

MLFLOW_BATCH = 1000  # number of values that MLflow accepts in one call
MLFLOW_PARAMETERS = 100  # number of parameters, and of tags, that MLflow accepts in one call
MLFLOW_VALUE = 500  # letters of a parameter that every version of MLflow's server accepts
# Tag in which MLflow's page looks for tables; `MlflowClient.log_table` writes it, but needs pandas.
MLFLOW_TABLES = "mlflow.loggedArtifacts"
MLFLOW_TABLES_LISTED = 50  # newest tables in that tag, whose length is limited


@dataclass(frozen=True)
class RunDescription:
    """How services name a run, and what they show of its config."""

    name: str  # such as "quickstart-calibadv/seed-0"
    group: str = ""  # runs that belong together, such as the seeds of "quickstart-calibadv"
    kind: str = "train"  # of the run: train or cold start
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the config, nested, without secrets

    def flat_parameters(self) -> dict[str, str]:
        """Return dotted key -> value as text."""
        return {key: _as_text(value) for key, value in _flatten(self.parameters)}


class MetricsBackend(ABC):
    """Receives the finite values of every step."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, by name."""

    def rewind(self, step: int) -> None:  # noqa: B027 services keep the newest value of a step
        """Prepare for writing the steps from `step` on again."""

    def write_table(  # noqa: B027 files and gauges hold no tables
        self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Write a table of the step's trajectories; `rows` has a value for each column."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left, and release the backend."""


def open_backends(
    log: LogConfig,
    directory: Path,
    start_step: int | None,
    warn: Callable[[str], object] = lambda _: None,
    description: RunDescription | None = None,
) -> list[MetricsBackend]:
    """Open the backends that log.backends names.

    Args:
        log: The section `log`.
        directory: Folder of the metrics.
        start_step: First step that will be written; an earlier attempt may have written it already.
        warn: Takes a line when a service has gone.
        description: How services name the run; None: by the last two folders of `directory`.

    Raises:
        UserError: A package is missing, or a service cannot be used.
    """
    if description is None:
        description = RunDescription("/".join(directory.resolve().parts[-2:]).strip("/"))
    backends: list[MetricsBackend] = []
    for name in log.backends:
        if name == "tensorboard":
            backends.append(TensorBoard(directory, start_step))
        elif name == "wandb":
            backends.append(WeightsAndBiases(log, directory, description))
        elif name == "mlflow":
            backends.append(MLflow(log, directory, warn, description))
        elif name == "prometheus":
            backends.append(Prometheus(log))
        else:
            raise KeyError(name)  # the section refuses other names
    return backends


class TensorBoard(MetricsBackend):
    """Event files in ``<directory>/tensorboard``.

    The caller's thread writes them: the thread of tensorboardX' SummaryWriter dies on a full disk, and its
    queue then blocks the run.
    """

    def __init__(self, directory: Path, start_step: int | None) -> None:
        # Imported here, because tensorboardX imports torch if it is installed, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._make_writer = EventsWriter
        self._make_event = Event
        self._make_scalar = scalar
        self._session_start = SessionLog(status=SessionLog.START)
        self._folder = directory / "tensorboard"
        self._num_files = 0
        self._open(start_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with wrap_disk_errors(self._folder):
            for name, value in values.items():
                self._add(step, summary=self._make_scalar(name, value))
            self._events.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        with wrap_disk_errors(self._folder):
            self._events.close()

    def _open(self, purge_step: int | None) -> None:
        """Open a new file; its first event hides the steps from `purge_step` on in earlier files."""
        # The name of a file holds its second. Without the number, two files of one second would be one.
        self._num_files += 1
        with wrap_disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            prefix = str(self._folder / "events")
            self._events = self._make_writer(prefix, filename_suffix=f".{self._num_files}")
            if purge_step is not None:
                self._add(purge_step, session_log=self._session_start)
            self._events.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._events.write_event(self._make_event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases(MetricsBackend):
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the folder, for ``wandb sync``.

    A resumed run is continued. The x-axis of its values is ``step``, so that steps that are written again
    replace the curve.
    """

    def __init__(self, log: LogConfig, directory: Path, description: RunDescription) -> None:
        wandb = _import_package("wandb", "wandb")
        self._make_table = wandb.Table
        id_file = directory / "wandb_run_id"
        try:
            self._run = wandb.init(
                project=log.project,
                resume="allow",
                name=description.name,
                group=description.group or None,
                job_type=description.kind,
                dir=str(directory),
                id=_read_id(id_file),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"log.backends: no Weights & Biases ({one_line(error)}); log in, or set WANDB_MODE=offline"
            ) from error
        write_text(id_file, self._run.id)
        # A resumed run may have other values of some keys (checkpoint.allow_change).
        self._run.config.update(dict(description.parameters), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def write_table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._make_table(
            columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True
        )
        self._run.log({"step": step, "trajectories": table})

    def close(self) -> None:
        self._run.finish()


class MLflow(MetricsBackend):
    """A run of the MLflow experiment log.project, at MLFLOW_TRACKING_URI; a resumed run is continued.

    A server that goes away does not end the run: the values that it missed are sent after a later step.
    """

    def __init__(
        self,
        log: LogConfig,
        directory: Path,
        warn: Callable[[str], object],
        description: RunDescription,
    ) -> None:
        mlflow = _import_package("mlflow", "mlflow-skinny")
        self._error = mlflow.exceptions.MlflowException
        self._make_metric = mlflow.entities.Metric
        self._make_parameter = mlflow.entities.Param
        self._make_tag = mlflow.entities.RunTag
        self._warn = warn
        self._is_away = False  # whether the server failed at the last attempt
        self._unsent: list[Any] = []
        try:
            self._client = mlflow.MlflowClient()
            self._run_id = self._open_run(log.project, directory, description)
            self._send_parameters(description)
        except self._error as error:
            raise EnvironmentFailure(
                f"log.backends: no MLflow: {one_line(error)}; set MLFLOW_TRACKING_URI"
            ) from error

    def _open_run(self, project: str, directory: Path, description: RunDescription) -> str:
        """Return the id of this run's MLflow run, which an earlier attempt may have created."""
        id_file = directory / "mlflow_run_id"
        if not _read_id(id_file):
            experiment = self._client.get_experiment_by_name(project)
            if experiment:
                experiment_id = experiment.experiment_id
            else:
                experiment_id = self._client.create_experiment(project)
            run = self._client.create_run(experiment_id, run_name=description.name)
            write_text(id_file, run.info.run_id)
        run_id: str = self._client.get_run(_read_id(id_file)).info.run_id
        return run_id

    def _send_parameters(self, description: RunDescription) -> None:
        """Send the config. MLflow's parameters never change: another value at a later start becomes a tag."""
        present = self._client.get_run(self._run_id).data.params
        parameters = []
        tags = [self._make_tag("kind", description.kind), self._make_tag("group", description.group)]
        for key, text in description.flat_parameters().items():
            value = text[:MLFLOW_VALUE]
            if key not in present:
                parameters.append(self._make_parameter(key, value))
            elif present[key] != value:
                tags.append(self._make_tag(f"changed/{key}", value))
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + MLFLOW_PARAMETERS])
        for start in range(0, len(tags), MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, tags=tags[start : start + MLFLOW_PARAMETERS])

    def write_table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        path = f"trajectories/step_{step}.json"
        content = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]})
        try:
            self._client.log_text(self._run_id, content, path)
            listed = self._client.get_run(self._run_id).data.tags.get(MLFLOW_TABLES, "[]")
            tables = [table for table in json.loads(listed) if table["path"] != path]
            tables.append({"path": path, "type": "table"})
            self._client.set_tag(self._run_id, MLFLOW_TABLES, json.dumps(tables[-MLFLOW_TABLES_LISTED:]))
        except Exception as error:  # every kind of artifact store raises the errors of its own library
            self._warn(
                f"log.tables_every: MLflow does not take the table of step {step} ({one_line(error)}); the"
                " run's rollouts folder has the trajectories"
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        milliseconds = time.time_ns() // 1_000_000
        for name, value in values.items():
            mlflow_name = re.sub(r"[^\w\-.:/ ]", "_", name)  # MLflow accepts no other characters
            self._unsent.append(self._make_metric(mlflow_name, float(value), milliseconds, step))
        try:
            self._send()
        except self._error as error:
            if not self._is_away:
                self._warn(
                    f"log.backends: MLflow does not take metrics ({one_line(error)}); metrics.jsonl has them,"
                    " and they are sent again after the next step"
                )
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
            self._warn(
                f"log.backends: MLflow lacks {len(self._unsent)} values and the end of the run"
                f" ({one_line(error)}); metrics.jsonl has all of them"
            )


class Prometheus(MetricsBackend):
    """The newest step's values as gauges ``calibadv_<name>`` at http://HOST:PORT/metrics (log.prometheus)."""

    def __init__(self, log: LogConfig) -> None:
        client = _import_package("prometheus_client", "prometheus-client")
        core = _import_package("prometheus_client.core", "prometheus-client")
        self._make_gauge = core.GaugeMetricFamily
        self._values: dict[str, float] = {}
        registry = client.CollectorRegistry()
        registry.register(self)
        host, _, port = log.prometheus.rpartition(":")
        try:
            self._server, self._thread = client.start_http_server(int(port), host, registry)
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            raise UserError(
                f"log.prometheus={log.prometheus}: no server there ({one_line(error)}); choose another port"
            ) from error

    def collect(self) -> Iterator[Any]:
        """Yield the gauges; the server calls this for every scrape."""
        used: Counter[str] = Counter()
        for name, value in self._values.items():
            metric = find_metric(name)
            meaning = f"{metric.meaning} [{metric.unit}]" if metric else name
            gauge = "calibadv_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            used[gauge] += 1
            # Metrics such as a/b and a_b get different names: Prometheus refuses a scrape that has one name
            # twice.
            if used[gauge] > 1:
                gauge = f"{gauge}_{used[gauge]}"
            yield self._make_gauge(gauge, meaning, value=value)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {"step": step, **values}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value; lists and empty sections count as values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_text(value: Any) -> str:
    """Return a text as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_id(path: Path) -> str | None:
    """Return a service's id of this run from a file of the run's folder; None if there is none."""
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def _import_package(module: str, package: str) -> Any:
    """Import an optional module; raise UserError with the name of its package if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"log.backends: {package} is not installed; pip install {package}") from error
