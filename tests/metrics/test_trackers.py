"""Where metrics go beside metrics.jsonl: each backend is written to and read back by its own means."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import sys
import time
import urllib.request
from dataclasses import replace

import pytest

from calibadv_jax.config import LogConfig, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.metrics_writer import MetricsWriter
from calibadv_jax.metrics.trackers import RunDescription, open_backends


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The package, with its store in a folder."""
    package = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    package.set_tracking_uri((tmp_path / "store").as_uri())
    return package


@pytest.fixture
def prometheus():
    """A config of this backend, at a port that is free."""
    pytest.importorskip("prometheus_client", reason="the extras cpu, gpu and tpu have it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return LogConfig(backends=["prometheus"], prometheus=address)


def write(folder, backends, steps, start_step=1, **log):
    """Write a metric = step / 2, a name with other letters, and a value that is not finite, as a run does."""
    opened = open_backends(LogConfig(backends=backends, **log), folder, start_step)
    with MetricsWriter(folder, opened, start_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 2, "eval/1/a b (c)/f1": 0.25, "kl": float("nan")})


def events(directory):
    """(tag, step, value) of the scalars in the event files of a folder, in order, and the purged steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars, purged = [], []
    for path in sorted(directory.glob("events.*")):
        data = path.read_bytes()
        while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            if event.session_log.status == SessionLog.START:
                purged.append(event.step)
            data = data[16 + length :]
    return scalars, purged


def test_tensorboard(tmp_path):
    folder = tmp_path / "run"
    opened = open_backends(LogConfig(), folder, 1)
    with MetricsWriter(folder, opened, 1) as writer:
        writer.write(1, {"loss": 0.5, "kl": float("nan")})
        writer.write(2, {"loss": 0.25})
        writer.rewind(2)
        writer.write(2, {"loss": 0.75})
    scalars, purged = events(folder / "tensorboard")
    assert scalars == [("loss", 1, 0.5), ("loss", 2, 0.25), ("loss", 2, 0.75)]
    assert purged == [1, 2]  # TensorBoard drops what was written before at these steps


def test_tensorboard_on_a_full_disk_is_an_error(small_disk):
    """More values than the queue of a SummaryWriter takes: its thread dies, and the run waits for ever."""
    [backend] = open_backends(LogConfig(), small_disk, 1)
    (small_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
    with pytest.raises(OSError) as caught:
        for step in range(100):
            backend.write(step, {f"loss/{number}": 0.5 for number in range(100)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "tensorboard"))


def test_run_without_backends_writes_metrics_only(tmp_path):
    write(tmp_path / "run", [], [1])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.medium
def test_mlflow_continues_its_run(tmp_path, mlflow):
    write(tmp_path / "seed-4", ["mlflow"], [1, 2], project="agents")
    write(tmp_path / "seed-4", ["mlflow"], [2, 3], start_step=2, project="agents")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("agents").experiment_id])
    assert run.info.run_name == f"{tmp_path.name}/seed-4" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert set(run.data.metrics) == {"reward/mean", "eval/1/a b _c_/f1"}


DESCRIPTION = RunDescription(
    "quickstart-grpo/seed-4",
    group="quickstart-grpo",
    kind="cold start",
    parameters={"run": {"seed": 4}, "advantage": {"name": "grpo", "probes": []}, "note": "é" * 600},
)
COLUMNS = ("question", "score")
TABLES = {1: [["who?", 0.5], ["<b>", 1]], 2: [["where?", None]]}


def described(folder, backend, description):
    """Write two tables and a metric as a run with this description."""
    opened = open_backends(LogConfig(backends=[backend], project="agents"), folder, 1, print, description)
    with MetricsWriter(folder, opened, 1) as writer:
        for step, rows in TABLES.items():
            writer.write(step, {"reward/mean": step / 2})
            writer.write_table(step, COLUMNS, rows)


@pytest.mark.medium
def test_mlflow_has_name_parameters_and_tables(tmp_path, mlflow):
    described(tmp_path / "run", "mlflow", DESCRIPTION)
    changed = replace(DESCRIPTION, parameters={"run": {"seed": 5}, "new": True})
    described(tmp_path / "run", "mlflow", changed)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("agents").experiment_id])
    assert run.info.run_name == "quickstart-grpo/seed-4"
    assert run.data.params == {
        "run.seed": "4",
        "advantage.name": "grpo",
        "advantage.probes": "[]",
        "note": "é" * 500,
        "new": "true",
    }
    tags = run.data.tags
    assert (tags["kind"], tags["group"], tags["changed/run.seed"]) == ("cold start", "quickstart-grpo", "5")
    tables = json.loads(tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": f"trajectories/step_{step}.json", "type": "table"} for step in TABLES]
    for step, rows in TABLES.items():
        path = client.download_artifacts(run.info.run_id, f"trajectories/step_{step}.json", str(tmp_path))
        with open(path, encoding="utf-8") as file:
            assert json.load(file) == {"columns": list(COLUMNS), "data": rows}


@pytest.mark.medium
def test_lost_artifact_store_is_a_warning(tmp_path, monkeypatch, mlflow):
    warnings = []
    folder = tmp_path / "run"
    opened = open_backends(LogConfig(backends=["mlflow"]), folder, 1, warnings.append, DESCRIPTION)

    def log_text(*arguments):
        raise ConnectionError("bucket\nis gone")

    monkeypatch.setattr(mlflow.MlflowClient, "log_text", log_text)
    with MetricsWriter(folder, opened, 1) as writer:
        writer.write_table(7, COLUMNS, TABLES[1])
        writer.write(7, {"reward/mean": 0.5})
    (warning,) = warnings
    assert "does not take the table of step 7 (bucket is gone)" in warning


def test_files_and_gauges_take_no_table(tmp_path, prometheus):
    log = replace(prometheus, backends=["tensorboard", "prometheus"])
    with MetricsWriter(tmp_path, open_backends(log, tmp_path, 1), 1) as writer:
        writer.write_table(1, COLUMNS, TABLES[1])
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.medium
@pytest.mark.parametrize("comes_back", [True, False])
def test_lost_mlflow_does_not_end_the_run(tmp_path, monkeypatch, mlflow, comes_back):
    log_batch, away, warnings = mlflow.MlflowClient.log_batch, [], []

    def batch(client, run, **content):
        if away:
            raise mlflow.exceptions.MlflowException("no route\nto host")
        log_batch(client, run, **content)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", batch)
    folder = tmp_path / "seed-4"
    opened = open_backends(LogConfig(backends=["mlflow"]), folder, 1, warnings.append)
    with MetricsWriter(folder, opened, 1) as writer:
        for step, is_away in enumerate([False, True, True, not comes_back], 1):
            away[:] = [True] if is_away else []
            writer.write(step, {f"m{number}": step for number in range(400)})
    client = mlflow.MlflowClient()
    for name in ("m7", "m399"):  # the last one comes in a second batch
        history = client.get_metric_history((folder / "mlflow_run_id").read_text(), name)
        steps = (1, 2, 3, 4) if comes_back else (1,)
        assert [(point.step, point.value) for point in history] == [(n, n) for n in steps]
    assert "does not take metrics (no route to host)" in warnings[0]
    assert ["lacks 1200 values" in line for line in warnings[1:]] == ([] if comes_back else [True])
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_prometheus_shows_the_newest_step(tmp_path, prometheus):
    opened, address = open_backends(prometheus, tmp_path, 1), prometheus.prometheus
    with MetricsWriter(tmp_path, opened, 1) as writer:
        writer.write(1, {"reward/mean": 0.5, "rollout/failed": 1.0})
        writer.write(2, {"reward/mean": 0.75} | dict.fromkeys(("f1/nq/open", "f1/nq_open", "f1/百科"), 0.5))
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=250) as reply:
            text = reply.read().decode()
        for used in (address, "127.0.0.1:99999"):
            with pytest.raises(UserError, match=f"log.prometheus={used}: no server there"):
                open_backends(replace(prometheus, prometheus=used), tmp_path, 1)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    f1 = [f"calibadv_f1_{name} 0.5" for name in ("__", "nq_open", "nq_open_2")]
    assert sorted(lines) == [*f1, "calibadv_reward_mean 0.75", "calibadv_step 2.0"]
    assert "# HELP calibadv_reward_mean answer score times format validity" in text
    with pytest.raises(OSError):  # the end of the run closes it
        urllib.request.urlopen(f"http://{address}/metrics", timeout=1)


@pytest.mark.parametrize("address", ["9464", "http://127.0.0.1:9464", "host:", "host:port"])
def test_address_without_port_is_refused(tmp_path, address):
    (tmp_path / "a.yaml").write_text("{}")
    with pytest.raises(UserError, match="log.prometheus: .*pattern"):
        load_config(tmp_path / "a.yaml", [f"log.prometheus={address}"])


@pytest.mark.parametrize("package", ["wandb", "mlflow-skinny", "prometheus-client"])
def test_missing_package_is_refused(tmp_path, monkeypatch, package):
    name = package.partition("-")[0]
    monkeypatch.setitem(sys.modules, "prometheus_client" if name == "prometheus" else name, None)
    with pytest.raises(UserError, match=f"log.backends: {package} is not installed; pip install {package}"):
        open_backends(LogConfig(backends=[name]), tmp_path, 1)


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row: rows.append((run.id, row)) or log(run, row))
    folder = tmp_path / "seed-4"
    for steps in ([1, 2], [2, 3]):
        folder.mkdir(exist_ok=True)
        write(folder, ["wandb"], steps, start_step=steps[0])
        time.sleep(1.1)  # W&B names its folders by the second
    assert [(row["step"], row["reward/mean"]) for _, row in rows] == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert {name for name, _ in rows} == {(folder / "wandb_run_id").read_text()}, "the run is continued"
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 2


def log_records(data, block=32768):
    """Yield the records of LevelDB's log format.

    Its blocks hold records with a checksum (4 bytes), a length (2) and a kind (1).
    """
    position = 7  # after the file's own header
    parts = []
    while position + 7 <= len(data):
        if block - position % block < 7:  # no room for a record's header: the rest is padding
            position += block - position % block
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def logged_records(path, kind):
    """Records of a kind in a file of W&B."""
    from wandb.proto import wandb_internal_pb2

    records = [wandb_internal_pb2.Record.FromString(data) for data in log_records(path.read_bytes())]
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


@pytest.mark.slow
def test_weights_and_biases_has_name_config_and_tables(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    folder.mkdir()
    described(folder, "wandb", DESCRIPTION)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    tables = []
    while len(tables) < len(TABLES):  # bounded by pytest's limit
        time.sleep(0.05)  # W&B's service writes on for a moment
        tables = [row for row in logged_rows(file) if "trajectories/_type" in row]
    run = logged_records(file, "run")[-1]
    names = (run.project, run.display_name, run.run_group, run.job_type)
    assert names == ("agents", "quickstart-grpo/seed-4", "quickstart-grpo", "cold start")
    config = {}
    for record in [run.config, *logged_records(file, "config")]:
        config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.update}
    assert config["run"] == {"seed": 4} and config["advantage"]["name"] == "grpo"
    shown = [(row["step"], row["trajectories/_type"], row["trajectories/nrows"]) for row in tables]
    assert shown == [(1, "table-file", 2), (2, "table-file", 1)]
    paths = sorted(folder.glob("wandb/offline-run-*/files/media/table/*.json"))
    files = [json.loads(path.read_text()) for path in paths]
    assert sorted(table["data"] for table in files) == sorted(TABLES.values())
    assert files[0]["columns"] == list(COLUMNS)


def logged_rows(path):
    """Rows that were logged to a file of W&B, from its protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    return rows


@pytest.mark.slow
def test_weights_and_biases_writes_its_files(tmp_path, monkeypatch):
    """Its own process writes them; W&B's service writes on for a moment after the run has ended."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "seed-4"
    folder.mkdir()
    write(folder, ["wandb"], [1, 2])
    time.sleep(1.1)  # W&B names its folders by the second
    write(folder, ["wandb"], [2, 3], start_step=2)
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    expected = [[(1, 0.5), (2, 1.0)], [(2, 1.0), (3, 1.5)]]
    rows = []
    while sum(map(len, rows)) < 4:  # bounded by pytest's limit
        time.sleep(0.05)
        rows = [[(row["step"], row["reward/mean"]) for row in logged_rows(path)] for path in files]
    assert rows == expected, [path.stat().st_size for path in files]
