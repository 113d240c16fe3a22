"""The share of a device's speed that `plan` counts with, and whether it says where that comes from."""

import pytest
from plan_rig import planned

from benchmarks.device import SHAPES
from calibadv_jax.config import Config, LearnerConfig, MeshConfig, PolicyConfig, RolloutConfig, SamplerConfig
from calibadv_jax.contrib.planning.efficiency import efficiency_of
from calibadv_jax.contrib.planning.hardware import find_target
from calibadv_jax.contrib.planning.work import Costs, ExpectedRollouts
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf

H100 = find_target(gpu="h100")
SMALL = architecture_from_hf(SHAPES["qwen2.5-0.5b"])
LARGE = architecture_from_hf(SHAPES["qwen2.5-7b"])


def test_measured_figures_give_the_measured_seconds():
    """Those of benchmarks/gpu.md: 16 rows of 8,192 tokens; 256 tokens in 256 rows after prompts of 1,024."""
    config = Config(
        policy=PolicyConfig(attention="triton", remat="full"),
        learner=LearnerConfig(pack_length=8192, microbatch_rows=8),
        sampler=SamplerConfig(slots=256),
        rollout=RolloutConfig(max_length=1281, max_prompt_length=1024, max_concurrency=256),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
    )
    efficiency = efficiency_of(0, SMALL, H100, samples_here=True)
    assert efficiency.source.startswith("measured: Qwen2.5-0.5B on one H100")
    costs = Costs(config, SMALL, 4096)
    update = costs.update("update", 16 * 8192)
    forward = costs.forward("log-probabilities", 16 * 8192)
    assert update.seconds(H100, efficiency.of(update.name)) == pytest.approx(2.500, rel=0.05)
    assert forward.seconds(H100, efficiency.of(forward.name)) == pytest.approx(0.488, rel=0.05)
    sampling = Costs(config, SMALL, 1280).sampling(ExpectedRollouts(256, 1280, 256), config)
    seconds = sum(part.seconds(H100, efficiency.of(part.name)) for part in sampling)
    assert seconds == pytest.approx(3.126, rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "target"), [(LARGE, H100), (SMALL, find_target(tpu="v5e:2x4"))], ids=["7B", "TPU"]
)
def test_what_was_not_measured_is_called_an_assumption(architecture, target):
    efficiency = efficiency_of(0, architecture, target, samples_here=True)
    assert str(efficiency).startswith("0.4 (an assumption: nothing was measured near this size")


def test_share_of_the_user_is_that_of_every_part():
    efficiency = efficiency_of(0.3, SMALL, H100, samples_here=True)
    names = ("update", "optimizer's step", "critic's values", "prefill", "decode")
    assert {efficiency.of(name) for name in names} == {0.3}
    assert str(efficiency) == "0.3 (--efficiency)"


def test_vllm_was_not_measured():
    efficiency = efficiency_of(0, SMALL, H100, samples_here=False)
    assert efficiency.of("decode") == 0.4
    assert efficiency.source.endswith("vLLM's is an assumption")


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_share_beyond_its_bounds_is_refused(share):
    with pytest.raises(UserError, match=f"--efficiency {share}: must be above 0"):
        efficiency_of(share, SMALL, H100, samples_here=True)


def test_plan_prints_the_shares_of_a_measured_size():
    shape = " ".join(
        f"policy.init.{key}={str(value).lower()}" for key, value in SHAPES["qwen2.5-0.5b"].items()
    )
    words = f"--config configs/one_gpu.yaml --gpu h100 policy.path= policy.lora.rank=0 {shape}"
    _, _, plan = planned(words)
    assert str(plan.efficiency).startswith("0.29 (update), 0.36 (forward passes), 0.16 (sampling), measured")
