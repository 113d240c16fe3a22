"""Where a process learns that it is one of several, and what is refused."""

import dataclasses
from dataclasses import replace

import jax
import pytest

from calibadv_jax.config import Config, DistributedConfig, SamplerConfig, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.hosts.joining import KEYS, _check, alone, describe_processes, joined, own_workers


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in KEYS.values():
        monkeypatch.delenv(variable, raising=False)


PAIR = DistributedConfig(coordinator_address="a:1", num_processes=2, process_id=0)


def words_of(**keys):
    return describe_processes(Config(distributed=DistributedConfig(**keys)))


def test_one_process_is_the_default():
    assert words_of() == words_of(num_processes=1) == []
    with joined(Config()) as hosts:
        assert hosts.count == 1 and hosts.is_first and hosts.in_step
    assert jax._src.distributed.global_state.client is None


def test_keys_and_environment_number_the_process(monkeypatch):
    keys = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
    assert words_of(**keys) == ["several processes ON: this is number 1 of 2; they meet at a:1"]
    for variable, value in zip(KEYS.values(), ("b:2", "4", "3"), strict=True):
        monkeypatch.setenv(variable, value)
    assert words_of() == ["several processes ON: this is number 3 of 4; they meet at b:2"]
    assert words_of(**keys) == ["several processes ON: this is number 1 of 2; they meet at a:1"]
    assert words_of(coordinator_address="auto") == ["several processes ON: as many as JAX detects"]
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(UserError, match="JAX_PROCESS_ID='first' is no number"):
        words_of()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_processes": 2}, "nothing says where they meet: set distributed.coordinator_address"),
        ({"coordinator_address": "a:1", "process_id": 0}, "distributed.num_processes is missing"),
        ({"coordinator_address": "a:1", "num_processes": 2}, r"process_id is missing.*JAX_PROCESS_ID"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "process_id is 2, but there are distributed.num_processes=2: they are numbered 0 to 1",
        ),
    ],
)
def test_incomplete_section_is_refused(keys, message):
    with pytest.raises(UserError, match=message), joined(Config(distributed=DistributedConfig(**keys))):
        pass


def test_export_refuses_several_processes(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("run: {seed: 0}\n")
    keys = ["learner.optimizer.offload=host", "critic.optimizer.offload=host", "advantage.name=gae"]
    keys += ["policy.lora.rank=2", "rollout.replace_tied=1", "reward.answer=mine:score"]
    keys += [f"distributed.{key}={value}" for key, value in dataclasses.asdict(PAIR).items() if key in KEYS]
    config = load_config(tmp_path / "config.yaml", keys)
    assert describe_processes(config)
    with pytest.raises(UserError, match="calibadv export runs in one process"):
        alone(config.distributed, "export")
    alone(Config().distributed, "export")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    alone(Config().distributed, "export")


WORKERS = [f"http://node{number}:8100" for number in range(5)]


@pytest.mark.parametrize(
    ("sampler", "shares"),
    [
        ({"urls": WORKERS}, [WORKERS[:2], WORKERS[2:]]),
        ({"workers": 4, "worker_devices": ["0", "1", "2", "3"]}, [["0", "1"], ["2", "3"]]),
    ],
)
def test_process_has_its_own_vllm_workers(sampler, shares):
    config = SamplerConfig(name="vllm", **sampler)
    sections = [own_workers(config, index, 2) for index in (0, 1)]
    assert [first for _, first in sections] == [0, 2]
    assert [section.urls or section.worker_devices for section, _ in sections] == shares
    if "workers" in sampler:
        assert [section.workers for section, _ in sections] == [2, 2]
    assert own_workers(config, 0, 1) == (config, 0)
    each = [own_workers(config, index, 4 if "workers" in sampler else 5) for index in range(4)]
    assert [section.urls or section.worker_devices for section, _ in each] == [
        [worker] for worker in (WORKERS if "urls" in sampler else "0123")[:4]
    ]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"urls": ["http://a:1"]}, "names 1 vLLM worker for 2 processes: each process needs one .*; start 1"),
        ({"workers": 3}, "sampler.workers is 3, for 2 processes .* as many each: set it to a multiple of 2"),
    ],
)
def test_too_few_vllm_workers_are_refused(sampler, message):
    with pytest.raises(UserError, match=message):
        describe_processes(Config(distributed=PAIR, sampler=SamplerConfig(name="vllm", **sampler)))


class OnMachines(Hosts):
    """All processes have the same config and devices."""

    count = 2

    def __init__(self, *machines):
        self.machines = machines


def test_retriever_of_several_machines_needs_a_url():
    config = Config()
    _check(config, OnMachines("a", "a"))
    with pytest.raises(UserError, match="retriever.url is empty, and the processes are on 2 machines"):
        _check(config, OnMachines("a", "b"))
    _check(replace(config, retriever=replace(config.retriever, url="http://c:1")), OnMachines("a", "b"))
    with pytest.raises(UserError, match="sampler.workers is 3, for 2 processes"):
        _check(replace(config, sampler=SamplerConfig(name="vllm", workers=3)), OnMachines("a", "a"))
