"""Replicas of the parameters: the axis `data` of the mesh, beside the two that split them."""

import jax
import optax
import pytest
from rounding import close_in_norm
from test_learner import LOSS, VOCAB, samples, sgd_step
from tiny_policy import GROUPED

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import pack
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def policy():
    config = GROUPED | {"vocab_size": VOCAB, "num_hidden_layers": 1, "tie_word_embeddings": True}
    return Policy(architecture_from_hf(config), Numerics())


@pytest.fixture(autouse=True)
def eight_devices():
    if jax.device_count() < 8:
        pytest.skip("needs 8 (simulated) devices")


@pytest.mark.parametrize(
    ("mesh", "good", "bad"),
    [
        ({"data": 2, "fsdp": 4}, 8, 4),
        ({"data": 8, "fsdp": 1}, 8, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 2),
        ({"data": 1, "fsdp": 2, "tensor": 4}, 2, 1),
    ],
)
def test_rows_are_shared_by_replicas_and_shards(policy, mesh, good, bad):
    mesh = make_mesh(MeshConfig(**mesh))
    Learner(policy, optax.sgd(1.0), mesh, LearnerOptions(good))
    with pytest.raises(
        UserError, match=f"is {bad}, but must be a multiple of .* = {good} .*set it to {good}"
    ):
        Learner(policy, optax.sgd(1.0), mesh, LearnerOptions(bad))


def test_replicas_make_the_step_of_one_device(policy):
    batch = pack(samples(9), 32)
    single = make_mesh(MeshConfig(fsdp=1), devices=jax.devices()[:1])
    many = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    (alone, alone_metrics), (shared, shared_metrics) = (
        sgd_step(policy, mesh, batch, rows, LOSS) for mesh, rows in ((single, 4), (many, 4))
    )
    close_in_norm(alone, shared)
    assert alone_metrics.keys() == shared_metrics.keys()
    for name, value in alone_metrics.items():
        assert shared_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
