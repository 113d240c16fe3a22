"""A GPU beside the CPU of the same machine; scripts/gpu_check.sh runs it.

A GPU multiplies float32 matrices in TF32 (10 bits) by default, so numbers agree to about a thousandth.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rounding import close_in_norm
from test_attention import rows
from tiny_policy import GROUPED, tiny

from calibadv_jax.config import LossConfig, MeshConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.policy.attention import packed_attention
from calibadv_jax.policy.sharding import make_mesh

pytestmark = pytest.mark.skipif(
    "cuda" not in os.environ.get("JAX_PLATFORMS", ""), reason="for a GPU: JAX_PLATFORMS=cuda,cpu"
)
SHAPE = GROUPED | {"hidden_size": 256, "vocab_size": 512}  # heads of 64, as Qwen2.5-0.5B's


def on_cpu(function, *arrays):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(function)(*arrays)


TOKAMAX = () if importlib.util.find_spec("tokamax") is None else ("tokamax",)
CASES = [(kernel, "float32", 3e-3, 3e-3) for kernel in ("xla", "triton")]
CASES += [(kernel, "bfloat16", 1e-2, 2e-2) for kernel in ("xla", *TOKAMAX, "triton", "cudnn")]


@pytest.mark.parametrize(("kernel", "dtype", "values_gap", "gradients_gap"), CASES)
def test_attention_and_its_gradients(kernel, dtype, values_gap, gradients_gap):
    q, k, v, segments = rows(1, 1000, 14, 2, 64)
    q, k, v = (np.asarray(jnp.asarray(x, dtype)) for x in (q, k, v))

    def gradients(kernel):
        def objective(q, k, v):
            out = packed_attention(q, k, v, segments, kernel, 256).astype(jnp.float32)
            out *= (segments > 0)[..., None, None]
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)

    actual = jax.jit(gradients(kernel))(q, k, v)
    expected = on_cpu(gradients("xla"), *(np.asarray(x, np.float32) for x in (q, k, v)))
    close_in_norm(actual[1], expected[1], values_gap)
    close_in_norm(actual[0], expected[0], gradients_gap)


def test_update_is_that_of_the_cpu():
    rng = np.random.default_rng(0)
    samples = []
    for length in (40, 57, 33, 60):
        tokens, credit = rng.integers(0, 512, length).astype(np.int32), rng.normal(size=length)
        mask, old = np.arange(length) > 5, -np.ones(length, np.float32)
        samples.append(Sample(tokens, mask, credit.astype(np.float32), old))
    batch, loss, updated = pack(samples, 128), policy_gradient(LossConfig(), on_policy=True), {}
    for device, kernel in ((jax.devices("cuda")[0], "triton"), (jax.devices("cpu")[0], "xla")):
        policy = tiny(SHAPE, kernel=kernel)
        mesh = make_mesh(MeshConfig(), devices=[device])
        learner = Learner(policy, optax.sgd(1.0), mesh, LearnerOptions(2))
        params = jax.device_get(on_cpu(policy.init, jax.random.key(0)))
        state, _ = learner.update(learner.init(params), [batch], loss)
        moved = jax.tree.map(lambda new, old: np.asarray(new) - old, jax.device_get(state["params"]), params)
        updated[kernel] = moved, learner.logprobs(params, batch)
    close_in_norm(updated["triton"][0], updated["xla"][0], 5e-3)
    close_in_norm(updated["triton"][1], updated["xla"][1], 2e-3)
