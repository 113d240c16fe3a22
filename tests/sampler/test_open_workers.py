"""The rollout workers of a run: started side by side, each on its own devices."""

from dataclasses import replace
from pathlib import Path

import pytest
from http_rig import Handler, late, serving

from calibadv_jax.config import Config, SamplerConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.wiring import open_services
from calibadv_jax.sampler import vllm_worker
from calibadv_jax.sampler.vllm_worker import VllmWorkerProcess, open_workers
from calibadv_jax.services import http_client


@pytest.fixture
def events(monkeypatch):
    """What happens to the processes, which are not started; worker 2 fails where `fails` is set."""
    happened = []

    def note(what):
        def method(self):
            happened.append((what, self.what, self))
            self.url = f"http://{self.log_path.stem}"
            if what == "wait" and note.fails and self.what.endswith("2"):
                raise UserError("not ready")

        return method

    note.fails = False
    for what in ("start", "wait", "stop"):
        monkeypatch.setattr(VllmWorkerProcess, what, note(what))
    monkeypatch.setattr(vllm_worker, "require_vllm", lambda: None)
    return happened, note


def opened(warn=print, **options):
    config = SamplerConfig(name="vllm", **options)
    return open_workers(config, Path("model"), Path("logs"), "float32", 512, warn)


def test_every_worker_has_its_own_devices_log_and_options(events):
    happened, _ = events
    with opened(
        workers=3, worker_devices=["4,5", "6", "7"], flavour="cpu", slots=9, worker_args=["--x"]
    ) as urls:
        assert urls == [f"http://vllm_worker_{number}" for number in range(3)]
    assert [what for what, _, _ in happened] == ["start"] * 3 + ["wait"] * 3 + ["stop"] * 3
    workers = [worker for what, _, worker in happened if what == "start"]
    assert [worker.environment for worker in workers] == [
        {"CUDA_VISIBLE_DEVICES": d} for d in ("4,5", "6", "7")
    ]
    for worker in workers:
        words = worker.command
        options = {name: words[words.index(f"--{name}") + 1] for name in ("model", "dtype", "flavour")}
        assert options == {"model": "model", "dtype": "float32", "flavour": "cpu"}
        assert words[words.index("--max_model_len") + 1] == "512"
        assert words[words.index("--max_num_seqs") + 1] == "9"
        assert words[-1] == "--x"


def test_without_devices_of_their_own_they_see_what_the_trainer_sees(events):
    happened, _ = events
    with opened(workers=2):
        pass
    assert all(worker.environment == {} for _, _, worker in happened)


def test_all_end_where_one_does_not_become_ready(events):
    happened, note = events
    note.fails = True
    with pytest.raises(UserError, match="not ready"), opened(workers=3):
        pass
    assert sorted(name[-1] for what, name, _ in happened if what == "stop") == ["0", "1", "2"]


class Info(Handler):
    def do_GET(self):
        is_info = self.path == "/weight_info"
        self.reply(*((200, {"weight_version": "abc/3"}) if is_info else (404, {})))


def test_running_workers_are_taken_as_they_are_and_those_that_are_missing_are_named(events):
    happened, _ = events
    lines = []
    with serving(Info) as first, serving(Info) as second:
        with opened(lines.append, urls=[first, second]) as urls:
            assert urls == [first, second]
        assert lines == []
        with opened(lines.append, urls=[first, "http://127.0.0.1:9"], patience=600.0) as urls:
            assert urls == [first, "http://127.0.0.1:9"]
    assert len(lines) == 1 and lines[0].startswith(
        "vLLM worker http://127.0.0.1:9 is left out until it answers"
    )
    assert happened == []


def test_a_worker_that_is_still_starting_is_waited_for(events):
    lines = []
    with late(Info) as url, opened(lines.append, urls=[url], patience=60.0) as urls:
        assert urls == [url]
    assert len(lines) == 1
    assert lines[0].startswith(f"waiting up to 60 s for vLLM worker {url} (")
    assert lines[0].endswith("otherwise start it with scripts/launch_vllm_worker.sh or correct sampler.urls")


@pytest.mark.parametrize("content", [{"weight_version": "abc/3"}, {"error": "loading"}, b"<html>"], ids=repr)
def test_a_worker_that_says_that_it_cannot_answer_yet_is_waited_for(events, monkeypatch, content):
    """Whatever stands in its reply."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    statuses, lines = [503, 500], []

    class Starting(Info):
        def do_GET(self):
            if statuses:
                self.reply(statuses.pop(), content)
            else:
                super().do_GET()

    with serving(Starting) as url, opened(lines.append, urls=[url], patience=60.0) as urls:
        assert urls == [url] and not statuses
    assert len(lines) == 1 and lines[0].startswith(f"waiting up to 60 s for vLLM worker {url} (")


def test_a_worker_that_never_comes_and_what_is_no_worker_end_the_run(events):
    never = pytest.raises(UserError, match="vLLM worker http://127.0.0.1:9: cannot be reached .*; start it")
    with never, opened(urls=["http://127.0.0.1:9"], patience=0.3):
        pass

    class Other(Handler):
        def do_GET(self):
            self.reply(404, {})

    lines = []
    with serving(Other) as url, pytest.raises(UserError, match=f"{url}: no /weight_info; start the worker"):
        opened(lines.append, urls=[url], patience=600.0).__enter__()
    assert lines == []  # at once


@pytest.mark.parametrize(("dtype", "given"), [("", "float32"), ("bfloat16", "bfloat16")])
def test_workers_compute_in_their_own_precision_or_in_the_learners(events, tmp_path, dtype, given):
    happened, _ = events
    plain = Config()
    config = replace(
        plain,
        run=replace(plain.run, dir=str(tmp_path)),
        policy=replace(plain.policy, compute_dtype="float32"),
        sampler=SamplerConfig(name="vllm", dtype=dtype),
        retriever=replace(plain.retriever, url=NO_RETRIEVER),
        loss=replace(plain.loss, importance_cap=2.0),
    )
    with open_services(config, tmp_path):
        pass
    command = happened[0][2].command
    assert command[command.index("--dtype") + 1] == given
