"""Where a process learns that it is one of several, and what is refused."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import pytest

from calibadv_jax.config import Config, DistributedConfig, SamplerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.hosts.joining import KEYS, _check, alone, describe_processes, joined, own_workers

ADDRESS = {"coordinator_address": "a:1"}
PAIR = ADDRESS | {"num_processes": 2, "process_id": 1}
VARIABLES = dict(zip(KEYS.values(), ("b:2", "4", "3"), strict=True))


@pytest.mark.parametrize(
    ("keys", "variables", "words"),
    [
        ({}, {}, ""),
        ({"num_processes": 1}, {}, ""),
        (PAIR, {}, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({}, VARIABLES, "several processes ON: this is number 3 of 4; they meet at b:2"),
        (PAIR, VARIABLES, "several processes ON: this is number 1 of 2; they meet at a:1"),
        ({"coordinator_address": "auto"}, VARIABLES, "several processes ON: as many as JAX detects"),
        ({}, VARIABLES | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID='first' is no number"),
        ({"num_processes": 2}, {}, "nothing says where they meet: set distributed.coordinator_address"),
        (ADDRESS | {"process_id": 0}, {}, "distributed.num_processes is missing"),
        (ADDRESS | {"num_processes": 2}, {}, "process_id is missing: give it (or JAX_PROCESS_ID)"),
        (PAIR | {"process_id": 2}, {}, "process_id is 2, but there are distributed.num_processes=2"),
    ],
)
def test_keys_and_environment_number_the_process(monkeypatch, keys, variables, words):
    for variable in KEYS.values():
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    config = Config(distributed=DistributedConfig(**keys))
    if words and not words.startswith("several"):
        with pytest.raises(UserError) as refused, joined(config):
            pass
        assert words in str(refused.value)
        return
    assert describe_processes(config) == [words] * bool(words)
    with pytest.raises(UserError, match="calibadv export runs in") if words else nullcontext():
        alone(config.distributed, "export")
    if not words:
        with joined(config) as hosts:
            assert hosts.count == 1 and hosts.is_first and hosts.in_step
        assert jax._src.distributed.global_state.client is None


WORKERS = [f"http://node{number}:8100" for number in range(5)]


@pytest.mark.parametrize(
    ("sampler", "shares"),
    [
        ({"urls": WORKERS}, [WORKERS[:2], WORKERS[2:]]),
        ({"urls": WORKERS}, [[worker] for worker in WORKERS]),
        ({"workers": 4, "worker_devices": ["0", "1", "2", "3"]}, [["0", "1"], ["2", "3"]]),
        ({"workers": 4, "worker_devices": ["0", "1", "2", "3"]}, [["0"], ["1"], ["2"], ["3"]]),
    ],
)
def test_process_has_its_own_vllm_workers(sampler, shares):
    config = SamplerConfig(name="vllm", **sampler)
    sections = [own_workers(config, index, len(shares)) for index in range(len(shares))]
    assert [section.urls or section.worker_devices for section, _ in sections] == shares
    assert [first for _, first in sections] == [sum(map(len, shares[:index])) for index in range(len(shares))]
    if "workers" in sampler:
        assert [section.workers for section, _ in sections] == [len(share) for share in shares]
    assert own_workers(config, 0, 1) == (config, 0)


class OnMachines(Hosts):
    """All processes have the same config and devices."""

    count = 2

    def __init__(self, *machines):
        self.machines = machines


@pytest.mark.parametrize(
    ("machines", "section", "keys", "message"),
    [
        ("aa", "retriever", {}, ""),
        ("ab", "retriever", {}, "retriever.url is empty, and the processes are on 2 machines"),
        ("ab", "retriever", {"url": "http://c:1"}, ""),
        ("aa", "sampler", {"name": "vllm", "workers": 3}, "sampler.workers is 3, for 2 processes"),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:1]}, "names 1 vLLM worker for 2 .*; start 1"),
        ("aa", "sampler", {"name": "vllm", "urls": WORKERS[:2]}, ""),
    ],
)
def test_services_must_fit_several_processes(machines, section, keys, message):
    config = replace(Config(), **{section: replace(getattr(Config(), section), **keys)})
    with pytest.raises(UserError, match=message) if message else nullcontext():
        _check(config, OnMachines(*machines))
    if section == "sampler" and message:
        with pytest.raises(UserError, match=message):
            describe_processes(replace(config, distributed=DistributedConfig(**PAIR)))
