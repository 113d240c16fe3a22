"""Other ways to compute an update give the same results."""

import jax
import numpy as np
import pytest
from tiny_policy import GROUPED, row_logits, tiny

from benchmarks.compiled.update_variants import fused_products, unrolled_layers
from calibadv_jax.policy.transformer import MAX_UNROLLED_LAYERS

DEEP = GROUPED | {"vocab_size": 32, "num_hidden_layers": MAX_UNROLLED_LAYERS + 1}
POLICY = tiny(DEEP)
TOKENS = np.random.default_rng(1).integers(0, 32, (2, 7))


@pytest.mark.medium
@pytest.mark.parametrize("variant", [fused_products, unrolled_layers])
def test_variant_computes_the_same_logits(variant):
    params = jax.jit(POLICY.init)(jax.random.key(0))

    def compute():
        """With a new function, which is traced anew."""
        return jax.jit(lambda params: row_logits.__wrapped__(POLICY, params, TOKENS))(params)

    expected = compute()
    with variant():
        logits = compute()
    assert np.any(expected)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_variants_change_the_program():
    params = POLICY.abstract_params

    def text():
        return str(jax.make_jaxpr(lambda params: row_logits.__wrapped__(POLICY, params, TOKENS))(params))

    plain = text()
    with fused_products():
        assert text() != plain
    with unrolled_layers():
        assert "unroll=True" in text() or f"unroll={MAX_UNROLLED_LAYERS + 1}" in text()
