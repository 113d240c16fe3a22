"""Costs of a step beside XLA's counts, and the keys that a plan proposes."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from plan_rig import SHAPE, small

from calibadv_jax.contrib.cli.plan import changed, memory_of, remedy
from calibadv_jax.contrib.planning.compiled import (
    CRITIC_PROGRAMS,
    LEARNER_PROGRAMS,
    lowered_program,
    programs_of,
)
from calibadv_jax.contrib.planning.efficiency import Efficiency
from calibadv_jax.contrib.planning.hardware import find_target, placed_on, sampler_of
from calibadv_jax.contrib.planning.memory import GIB, peak_memory
from calibadv_jax.contrib.planning.work import Costs, Part, expected_rollouts, step_of
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh

pytestmark = pytest.mark.medium

FEW = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}
ARCHITECTURE = architecture_from_hf(SHAPE)
TARGET = find_target(gpu="h100", topology="1x1x4")
VLLM = {"sampler__name": "vllm"}
TWO = {"sampler__workers": 2, "sampler__worker_devices": "['0,1','2,3']"}
OLD_POLICY = {"mesh__fsdp": 2, "mesh__tensor": 2, "policy__remat": "dots", "loss__kl_coef": 0.1}
MINIBATCHES = {"advantage__name": "gae", "learner__epochs": 2, "learner__minibatch_size": 12}
CASES = {  # GPUs, and changes of the small run
    "data": ("1x1x4", {"mesh__data": 2, "mesh__fsdp": 2, "policy__remat": "none"}),
    "two hosts": ("1x2x2", OLD_POLICY),  # each has a sampler; a reference policy needs a pass of its own
    "adapters": ("1x1x4", {"policy__lora__rank": 4, "policy__logprob_chunk": 2048}),  # logits computed once
    "critic": ("1x1x4", MINIBATCHES),
    "few slots": ("1x1x4", {"sampler__urls": "[http://a:1,http://b:1]", "sampler__slots": 3} | VLLM),
    "two devices": ("1x1x4", VLLM | TWO | {"rollout__max_concurrency": 10}),
    "many slots": ("1x1x4", VLLM | {"sampler__slots": 64}),
}
PARTS = [  # operations, bytes of memory and bytes received of a part
    ("data", "update", 5.3773e12, 6.97753e9, 3.9337e8),
    ("data", "optimizer's step", 7.86739e8, 3.14696e8, 0),
    ("data", "decode", 1.38936e11, 4.7529e9, 0),
    ("two hosts", "log-probabilities", 1.56337e12, 2.41071e9, 1.73555e8),
    ("two hosts", "update", 5.37730e12, 7.38947e9, 3.86446e8),
    ("two hosts", "optimizer's step", 3.9337e8, 1.57348e8, 0),
    ("two hosts", "prefill", 1.25043e12, 1.02482e9, 0),
    ("two hosts", "decode", 1.38936e11, 4.7529e9, 0),
    ("adapters", "update", 4.55267e12, 8.72818e9, 2.36894e8),
    ("adapters", "optimizer's step", 2.90816e6, 1.16326e6, 0),
    ("critic", "log-probabilities", 1.56337e12, 2.22095e9, 1.18011e8),
    ("critic", "critic's values", 1.56337e12, 2.22095e9, 1.18011e8),
    ("critic", "update", 1.43796e13, 2.01655e10, 7.96573e8),
    ("critic", "critic's update", 1.43796e13, 2.01655e10, 7.96573e8),
    ("critic", "optimizer's step", 4.72044e9, 1.88817e9, 0),
    ("few slots", "prefill", 1.25043e12, 3.62742e9, 0),
    ("few slots", "decode", 1.38936e11, 2.26181e10, 0),
    ("two devices", "decode", 1.38936e11, 7.11311e9, 0),
    ("many slots", "decode", 1.38936e11, 7.2105e9, 0),
]


def step(folder, rollouts=(), **changed):
    config = placed_on(small(folder, **changed), TARGET)
    return step_of(config, ARCHITECTURE, expected_rollouts(config, *rollouts), TARGET)


FEW_ROWS = {"learner__pack_length": 256, "rollout__max_length": 256, "rollout__max_prompt_length": 128}


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
def test_operations_are_those_that_xla_counts(tmp_path, remat):
    """Of layers without a loop, and rows of one block and one chunk: XLA counts the body of a loop once."""
    keys = {"policy__compute_dtype": "float32", "policy__remat": remat, "mesh__fsdp": 1} | FEW_ROWS
    config = small(tmp_path, **keys, policy__attention="xla", policy__attention_chunk=256)
    architecture = architecture_from_hf(SHAPE | FEW)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    costs, positions = Costs(config, architecture, 256), 4 * 256
    for part in (costs.update("update", positions), costs.forward("log-probabilities", positions)):
        counted = lowered_program(config, architecture, mesh, part.name).cost_analysis()["flops"]
        assert 1 / 1.15 < part.flops / counted < 1.15, (part, counted)


def test_every_program_of_a_run_is_lowered(tmp_path):
    """A critic's and the sampler's too."""
    config = small(tmp_path, mesh__fsdp=1, advantage__name="gae", **FEW_ROWS)
    mesh, names = make_mesh(config.mesh, jax.devices()[:1]), programs_of(config)
    assert set(names) == {*LEARNER_PROGRAMS, *CRITIC_PROGRAMS, "prefill", "decode"}
    for name in names:
        assert lowered_program(config, architecture_from_hf(SHAPE | FEW), mesh, name).as_text()


def test_step_computes_full_rows_and_reports_fill(tmp_path):
    """32 trajectories: two in a row of 2,048 tokens, four rows a microbatch."""
    full = step(tmp_path, (1024, 100), learner__row_widths=1)
    assert full.fill == 1.0 and full.trained == 32 * 1024
    few = {"learner__minibatch_size": 2, "learner__row_widths": 1}  # a row in each microbatch of four
    assert step(tmp_path, (1024, 100), **few).fill == 0.25
    # Only several updates need the log-probabilities from before the first.
    assert "log-probabilities" not in {part.name for part in full.parts}


def test_smaller_minibatches_compute_more_rows(tmp_path):
    """One of a microbatch's four rows is filled, and several updates need the old log-probabilities."""
    full = step(tmp_path, (1024, 100), learner__row_widths=1)
    few = step(tmp_path, (1024, 100), learner__minibatch_size=2, learner__row_widths=1)
    assert flops(few)["update"] == pytest.approx(4 * flops(full)["update"])
    assert "log-probabilities" in flops(few)


def test_each_epoch_has_an_optimizer_step(tmp_path):
    once, twice = (step(tmp_path, (1024, 100), learner__epochs=epochs) for epochs in (1, 2))
    assert flops(twice)["optimizer's step"] == pytest.approx(2 * flops(once)["optimizer's step"])


def test_adapters_save_gradients_and_a_critic_adds_an_update(tmp_path):
    plain = flops(step(tmp_path))
    adapted = flops(step(tmp_path, policy__lora__rank=4))
    critic = flops(step(tmp_path, advantage__name="gae"))
    assert adapted["update"] < 0.8 * plain["update"]  # no gradients of the base's weights
    assert adapted["optimizer's step"] < 0.1 * plain["optimizer's step"]
    assert critic["critic's update"] == critic["update"]
    assert critic["critic's values"] < critic["update"]


def flops(counted):
    return {part.name: part.flops for part in counted.parts}


def test_part_takes_as_long_as_its_slowest_bound():
    chip = TARGET.chip
    part = Part("one", 4 * chip.flops, chip.bandwidth / 2, chip.links / 4, 4)
    assert part.seconds(TARGET, 1.0) == 1.0 and part.seconds(TARGET, 0.5) == 2.0
    assert replace(part, memory=3 * chip.bandwidth).seconds(TARGET, 1.0) == 3.0
    assert replace(part, received=5 * chip.links).seconds(TARGET, 1.0) == 5.0


def test_rollouts_and_update_overlap_on_separate_devices_only(tmp_path):
    asynchronous = VLLM | {"rollout__max_staleness": 1, "loss__importance_cap": 2}
    for changes, combine in (({"sampler__urls": "[http://a:1]"}, max), ({}, lambda *times: sum(times))):
        counted = step(tmp_path, **asynchronous, **changes)
        efficiency = Efficiency(update=0.3, forward=0.4, sampling=0.2, source="made up")
        times = {part.name: part.seconds(TARGET, efficiency.of(part.name)) for part in counted.parts}
        sampling = times.pop("prefill") + times.pop("decode")
        assert counted.seconds(TARGET, efficiency) == pytest.approx(combine(sampling, sum(times.values())))
        assert counted.overlap == bool(changes)


def test_expected_trajectories_are_the_longest_by_default(tmp_path):
    config = small(tmp_path)
    longest = expected_rollouts(config)
    assert (longest.trajectories, longest.tokens) == (32, 2048) and longest.sampled < 2048
    assert expected_rollouts(config, 1000, 50).sampled == 50
    assert expected_rollouts(small(tmp_path, rollout__max_searches=1)).sampled == 2 * 256  # and an answer
    for tokens, sampled in ((2049, 0), (100, 100)):
        with pytest.raises(UserError, match="--tokens 2049|--sampled 100"):
            expected_rollouts(config, tokens, sampled)


@pytest.mark.parametrize(("case", "name", "flops", "memory", "received"), PARTS)
def test_operations_and_bytes_of_each_part(tmp_path, case, name, flops, memory, received):
    """Of 32 trajectories of 1,000 tokens, 100 sampled."""
    topology, changes = CASES[case]
    target = find_target(gpu="h100", topology=topology)
    config = placed_on(small(tmp_path, **changes), target)
    parts = step_of(config, ARCHITECTURE, expected_rollouts(config, 1000, 100), target).parts
    (part,) = (part for part in parts if part.name == name)
    assert (part.flops, part.memory, part.received) == pytest.approx((flops, memory, received), rel=1e-5)


def needed(config, target):
    return peak_memory(memory_of(config, ARCHITECTURE, target))


def proposal(config, target, limit):
    """The remedy's line and its overrides, which fit."""
    line = remedy(config, ARCHITECTURE, target, limit)
    keys = [word.partition("=") for word in line.removeprefix("would fit: ").partition(" (")[0].split()]
    changes = {key: int(value) if value.isdigit() else value for key, _, value in keys}
    assert needed(changed(config, changes), target) <= limit
    return line, changes


ROWS, OFFLOAD, SLOTS = "learner.microbatch_rows", "learner.optimizer.offload", "sampler.slots"


@pytest.mark.parametrize(
    ("keys", "changes", "expected"),
    [  # of a run that may need what it needs with these changes
        (VLLM | {"policy__remat": "none", "learner__microbatch_rows": 1}, {"policy.remat": "dots"}, None),
        (VLLM | {"policy__remat": "none", "learner__microbatch_rows": 1}, {"policy.remat": "full"}, None),
        ({"learner__pack_length": 4096}, {"learner.pack_length": 2048}, None),
        ({"learner__microbatch_rows": 16}, {ROWS: 8}, None),
        ({}, {ROWS: 1, OFFLOAD: "host", SLOTS: 5}, {ROWS: 1, OFFLOAD: "host", SLOTS: 4}),
        ({}, {ROWS: 1, OFFLOAD: "host", "sampler.name": "vllm"}, None),
    ],
    ids=str,
)
def test_remedy_pulls_cheapest_levers_until_it_fits(tmp_path, keys, changes, expected):
    target = find_target(gpu="h100", topology="1x1x1")
    config = placed_on(small(tmp_path, **{"learner__microbatch_rows": 4} | keys), target)
    line, result = proposal(config, target, needed(changed(config, changes), target))
    assert result == (expected or changes)
    assert f" ({needed(changed(config, result), target) / GIB:.1f} GiB by the formula" in line


@pytest.mark.parametrize(
    ("rank", "least", "advice"),
    [(0, "0.1 GiB by", ", or train adapters (policy.lora.rank)"), (4, "0.", "or larger ones")],
)
def test_remedy_that_cannot_fit_names_least_memory(tmp_path, rank, least, advice):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path, policy__lora__rank=rank), target)
    line = remedy(config, ARCHITECTURE, target, 1.0)
    assert line.startswith("no combination of ") and f"(the least: {least}" in line
    assert line.endswith(advice)


def test_each_host_has_a_sampler_of_its_own(tmp_path):
    """Its weights lie on the devices of the host, and it has a share of the slots."""
    two, single = find_target(gpu="h100", topology="1x2x4"), find_target(gpu="h100", topology="1x1x8")
    config = small(tmp_path, learner__microbatch_rows=8)
    apart, together = (memory_of(placed_on(config, to), ARCHITECTURE, to) for to in (two, single))
    assert apart["sampler weights"] == pytest.approx(2 * together["sampler weights"], rel=0.01)  # but norms
    assert apart["kv cache"] == together["kv cache"]
    assert apart["parameters"] == together["parameters"]
    odd = placed_on(small(tmp_path, learner__microbatch_rows=8, sampler__slots=9), two)
    assert sampler_of(odd, two).sampler.slots == 5
    strongest = {OFFLOAD: "host", "mesh.fsdp": 4, "mesh.tensor": 2, ROWS: 4}
    strongest |= {"sampler.name": "vllm", "sampler.workers": 2}
    _, result = proposal(odd, two, needed(changed(odd, strongest), two))
    assert result.items() >= {"sampler.name": "vllm", "sampler.workers": 2}.items()


def test_workers_may_split_layers_over_hosts(tmp_path):
    """Only an embedded sampler must fit the devices of one host."""
    target = find_target(gpu="h100", topology="1x4x1")
    config = placed_on(small(tmp_path, mesh__fsdp=2, mesh__tensor=2, **VLLM), target)
    assert sampler_of(config, target) == config
    with pytest.raises(UserError, match="mesh.tensor is 2, but a process has 1 devices"):
        sampler_of(changed(config, {"sampler.name": "jax"}), target)
