"""A real vLLM server as a teacher: its log-probabilities are those of the policy that it serves."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packages import need
from tiny_policy import row_logits
from vllm_rig import QWEN2, Rig, prompts, running

from calibadv_jax.config import TeacherConfig
from calibadv_jax.contrib.teacher_server import TeacherServer
from calibadv_jax.core.errors import UserError

need("vllm", "torch")
pytestmark = pytest.mark.slow


def test_server_gives_the_policys_logprobs(tmp_path):
    with running(Rig(tmp_path, QWEN2)) as rig:
        params = rig.run(lambda sampler: rig.load(sampler, 1))  # a worker begins without weights
        server = TeacherServer(TeacherConfig(url=f"{rig.workers[0].url}/v1", model="policy"))
        assert server.identity()["root"] == str(rig.model_folder)
        server.check_vocabulary(rig.tokenizer)
        other = SimpleNamespace(convert_ids_to_tokens=lambda ids: ["?" for _ in ids])
        with pytest.raises(UserError, match="another vocabulary .* and '\\?' here"):
            server.check_vocabulary(other)
        sequences = [prompts(1, length, seed=length)[0] for length in (5, 64)]
        for tokens, values in zip(sequences, server.logprobs(sequences), strict=True):
            ids = jnp.asarray([tokens], jnp.int32)
            logits = row_logits(rig.policy, params, ids).astype(jnp.float32)[0, :-1]
            table = np.asarray(jax.nn.log_softmax(logits))
            np.testing.assert_allclose(values[1:], table[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-3)
        with pytest.raises(UserError, match="status 400"):
            server.logprobs([[3] * 4000])
