"""The rollout workers of a run: started side by side, each on its own devices, or found where they run."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts_rig import free_port
from http_rig import Handler, replying, serving
from trainer_rig import make_config

from calibadv_jax.config import SamplerConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.core.errors import UserError
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.run.wiring import open_services
from calibadv_jax.sampler import rollout_workers
from calibadv_jax.sampler.rollout_workers import VllmWorkerProcess, open_workers
from calibadv_jax.services import http_client


@pytest.fixture
def events(monkeypatch):
    """(method, worker) of the processes, which are not started; with --fail, worker 2 is never ready."""
    happened = []

    def note(method):
        def noted(self):
            happened.append((method, self))
            self.url = f"http://{self.log_path.stem}"
            if method == "wait" and self.name.endswith("2") and "--fail" in self.command:
                raise UserError("not ready")

        return noted

    for method in ("start", "wait", "stop"):
        monkeypatch.setattr(VllmWorkerProcess, method, note(method))
    monkeypatch.setattr(rollout_workers, "require_vllm", lambda: None)
    return happened


def opened(warn=print, **options):
    config = SamplerConfig(name="vllm", **options)
    return open_workers(config, Path("model"), Path("logs"), "float32", 512, warn)


def test_worker_has_its_devices_log_and_options(events):
    options = {"worker_devices": ["4,5", "6", "7"], "flavour": "cpu", "slots": 9, "worker_args": ["--x"]}
    with opened(workers=3, **options) as urls:
        assert urls == [f"http://vllm_worker_{number}" for number in range(3)]
    assert [method for method, _ in events] == ["start"] * 3 + ["wait"] * 3 + ["stop"] * 3
    workers = [worker for method, worker in events if method == "start"]
    devices = [{"CUDA_VISIBLE_DEVICES": names} for names in ("4,5", "6", "7")]
    assert [worker.environment for worker in workers] == devices
    expected = "--model model --flavour cpu --dtype float32 --max_model_len 512 --max_num_seqs 9 --x"
    assert all(worker.command[3:] == expected.split() for worker in workers)


class Second(ProcessGroup):
    """The second of two processes, whose main process starts no retriever."""

    process_index, process_count, is_main = 1, 2, False

    def run_on_main_and_broadcast(self, name, function):
        return ""


def test_second_process_starts_its_own_workers(events, tmp_path):
    """With numbers, logs and devices that no worker of the first process has."""
    sampler = {"name": "vllm", "workers": 4, "worker_devices": ["0", "1", "2,3", "4"]}
    retriever, loss = {"url": NO_RETRIEVER_URL}, {"importance_cap": 2.0}
    config = make_config(tmp_path, sampler=sampler, retriever=retriever, loss=loss)
    with open_services(config, tmp_path, Second()) as (_, urls):
        assert urls == ["http://vllm_worker_2", "http://vllm_worker_3"]
    workers = [worker for method, worker in events if method == "start"]
    assert [worker.name for worker in workers] == ["vLLM worker 2", "vLLM worker 3"]
    assert [worker.environment for worker in workers] == [{"CUDA_VISIBLE_DEVICES": d} for d in ("2,3", "4")]


def test_failed_start_stops_all_workers(events):
    with pytest.raises(UserError, match="not ready"), opened(workers=3, worker_args=["--fail"]):
        pass
    assert sorted(worker.name[-1] for method, worker in events if method == "stop") == ["0", "1", "2"]
    assert all(worker.environment == {} for _, worker in events)  # no devices: those of the trainer


INFO = 200, {"weight_version": "abc/3"}


def test_running_workers_are_used_and_missing_ones_named(events):
    lines = []
    with replying(INFO) as (first, _), replying(INFO) as (second, _):
        with opened(lines.append, urls=[first, second]) as urls:
            assert urls == [first, second] and lines == []
        with opened(lines.append, urls=[first, "http://127.0.0.1:9"], patience=600.0) as urls:
            assert urls == [first, "http://127.0.0.1:9"]
    (line,) = lines
    assert line.startswith("vLLM worker http://127.0.0.1:9 is left out until it answers") and events == []


def test_devices_of_the_trainer_are_seen_without_others(events):
    with opened(workers=2):
        pass
    workers = [worker for method, worker in events if method == "start"]
    assert [worker.environment for worker in workers] == [{}, {}]


def test_worker_that_is_still_starting_is_waited_for(monkeypatch):
    """At first nobody listens at its address."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    port = free_port()
    lines = []

    class Info(Handler):
        def do_GET(self):
            self.reply(*INFO)

    with ExitStack() as stack:

        def warn(line):
            lines.append(line)
            stack.enter_context(serving(Info, port))

        url = f"http://127.0.0.1:{port}"
        with opened(warn, urls=[url], patience=60.0) as urls:
            assert urls == [url]
    (line,) = lines
    assert line.startswith(f"waiting up to 60 s for vLLM worker {url} (")
    assert line.endswith("otherwise start it with scripts/launch_vllm_worker.sh or correct sampler.urls")


@pytest.mark.parametrize("content", [INFO[1], {"error": "loading"}, b"<html>"], ids=repr)
@pytest.mark.parametrize("statuses", [[500, 503], [503, 500]], ids=repr)
def test_worker_that_announces_absence_is_waited_for(monkeypatch, content, statuses):
    """Whatever its reply holds."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    lines = []
    replies = replying(*[(status, content) for status in statuses], INFO)
    with replies as (url, requests), opened(lines.append, urls=[url], patience=60.0) as urls:
        assert urls == [url] and len(requests) == 3
    (line,) = lines
    assert line.startswith(f"waiting up to 60 s for vLLM worker {url} (") and "sampler.urls" in line


def test_missing_or_foreign_worker_ends_the_run():
    never = pytest.raises(UserError, match="vLLM worker http://127.0.0.1:9: cannot be reached .*; start it")
    with never, opened(urls=["http://127.0.0.1:9"], patience=0.3):
        pass
    lines = []
    with (
        replying((404, {})) as (url, _),
        pytest.raises(UserError, match=f"{url}: no /weight_info; start the worker"),
    ):
        opened(lines.append, urls=[url], patience=600.0).__enter__()
    assert lines == []  # at once


@pytest.mark.parametrize(("dtype", "expected"), [("", "float32"), ("bfloat16", "bfloat16")])
def test_workers_compute_in_their_own_precision(events, tmp_path, dtype, expected):
    sampler, retriever = {"name": "vllm", "dtype": dtype}, {"url": NO_RETRIEVER_URL}
    policy, loss = {"compute_dtype": "float32"}, {"importance_cap": 2.0}
    config = make_config(tmp_path, sampler=sampler, retriever=retriever, policy=policy, loss=loss)
    with open_services(config, tmp_path):
        pass
    command = events[0][1].command
    assert command[command.index("--dtype") + 1] == expected
