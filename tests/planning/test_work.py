"""What a step is said to cost: beside what XLA counts in the programs, and by hand."""

from dataclasses import replace

import jax
import pytest
from plan_rig import SHAPE, small

from calibadv_jax.core.errors import UserError
from calibadv_jax.planning.compiled import lowered_programs
from calibadv_jax.planning.hardware import find_target, placed_on
from calibadv_jax.planning.work import Costs, Part, expected_rollouts, step_of
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh

pytestmark = pytest.mark.medium

FEW = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}
ARCHITECTURE = architecture_from_hf(SHAPE)
TARGET = find_target(gpu="h100", topology="1x1x4")


def step(folder, rollouts=(), **changed):
    config = placed_on(small(folder, **changed), TARGET)
    return step_of(config, ARCHITECTURE, expected_rollouts(config, *rollouts), TARGET)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_operations_are_those_that_xla_counts(tmp_path, remat):
    """Of layers without a loop, and rows of one block and one chunk: XLA counts the body of a loop once."""
    keys = {"mesh__fsdp": 1, "policy__compute_dtype": "float32", "policy__remat": remat}
    rows = {"learner__row_length": 256, "rollout__max_length": 256, "rollout__max_prompt_length": 128}
    config = small(tmp_path, **keys, **rows, policy__attention="xla", policy__attention_chunk=256)
    architecture = architecture_from_hf(SHAPE | FEW)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    lowered = lowered_programs(config, architecture, mesh, ["update", "log-probabilities"])
    costs, positions = Costs(config, architecture, 256), 4 * 256
    expected = {"update": costs.update(positions), "log-probabilities": costs.forward("", positions)}
    for name, part in expected.items():
        counted = lowered[name].cost_analysis()["flops"]
        assert 1 / 1.15 < part.flops / counted < 1.15, (name, part.flops, counted)


def test_a_step_computes_full_rows_and_says_how_full_they_are(tmp_path):
    """32 trajectories: two in a row of 2,048 tokens, four rows a microbatch."""
    full = step(tmp_path, (1024, 100), learner__row_widths=1)
    assert full.fill == 1.0 and full.trained == 32 * 1024
    few = {"learner__minibatch_size": 2, "learner__row_widths": 1}  # a row in each microbatch of four
    fewer = step(tmp_path, (1024, 100), **few)
    assert fewer.fill == 0.25
    work = {part.name: part.flops for part in fewer.parts}
    assert work["update"] == pytest.approx(4 * {part.name: part.flops for part in full.parts}["update"])
    assert "log-probabilities" in work  # several updates: the old ones are computed before the first
    assert "log-probabilities" not in {part.name for part in full.parts}
    twice = {part.name: part.flops for part in step(tmp_path, (1024, 100), learner__epochs=2).parts}
    assert twice["optimizer's step"] == pytest.approx(2 * full.parts[1].flops)


def test_a_part_takes_as_long_as_its_slowest_bound():
    chip = TARGET.chip
    part = Part("one", 4 * chip.flops, chip.bandwidth / 2, chip.links / 4, 4)
    assert part.seconds(TARGET, 1.0) == 1.0 and part.seconds(TARGET, 0.5) == 2.0
    assert replace(part, memory=3 * chip.bandwidth).seconds(TARGET, 1.0) == 3.0
    assert replace(part, received=5 * chip.links).seconds(TARGET, 1.0) == 5.0


def test_rollouts_and_update_overlap_only_on_devices_of_their_own(tmp_path):
    asynchronous = {"sampler__name": "vllm", "rollout__max_staleness": 1, "loss__importance_cap": 2}
    apart = step(tmp_path, sampler__urls="[http://a:1]", **asynchronous)
    here = step(tmp_path, **asynchronous)
    assert apart.overlap and not here.overlap
    assert apart.seconds(TARGET, 0.4) < here.seconds(TARGET, 0.4)
    times = [part.seconds(TARGET, 0.4) for part in here.parts]
    assert here.seconds(TARGET, 0.4) == pytest.approx(sum(times))


def test_trajectories_are_the_longest_unless_they_are_told(tmp_path):
    config = small(tmp_path)
    longest = expected_rollouts(config)
    assert (longest.trajectories, longest.tokens) == (32, 2048) and longest.sampled < 2048
    assert expected_rollouts(config, 1000, 50).sampled == 50
    assert expected_rollouts(small(tmp_path, rollout__max_searches=1)).sampled == 2 * 256  # and an answer
    for tokens, sampled in ((2049, 0), (100, 100)):
        with pytest.raises(UserError, match="--tokens 2049|--sampled 100"):
            expected_rollouts(config, tokens, sampled)


def test_adapters_and_a_critic_change_the_work(tmp_path):
    def flops(**changed):
        return {part.name: part.flops for part in step(tmp_path, **changed).parts}

    plain, adapted, critic = flops(), flops(policy__lora__rank=4), flops(advantage__name="gae")
    assert adapted["update"] < 0.8 * plain["update"]  # no gradients of the base's weights
    assert adapted["optimizer's step"] < 0.1 * plain["optimizer's step"]
    assert critic["critic's update"] == critic["update"] and critic["critic's values"] < critic["update"]
    assert critic["optimizer's step"] == 2 * plain["optimizer's step"]


def test_fewer_concurrent_trajectories_decode_longer(tmp_path):
    few, many = (step(tmp_path, rollout__max_concurrency=count).parts[-1] for count in (4, 16))
    assert few.name == "decode" and few.memory > many.memory
