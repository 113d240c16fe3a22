"""Adapters beside PEFT and torch: the same updates and files, on every layout of policies."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_policy import LLAMA3, mesh_of, row_logits, single_device, tiny

from calibadv_jax.config import LossConfig, OptimizerConfig
from calibadv_jax.learner.batching import Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.weights import to_hf
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config, save_folder
from calibadv_jax.snapshots.peft import load_adapters, save_adapters

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

COMMON = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
COMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS = {
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "num_hidden_layers": 1}),
    "llama": (transformers.LlamaConfig, {"num_hidden_layers": 1, "rope_scaling": LLAMA3}),
}
TARGETS = {"qwen2": "q k v o gate up down", "qwen3": "q v down", "llama": "q k v o gate up down"}
RANK, ALPHA, UPDATES = 4, 12.0, 3
# AdamW divides gradients by their size. Those below eps make no whole steps, which rounding would direct.
OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="constant", eps=1e-4, max_grad_norm=0.05)
LOSS = policy_gradient(LossConfig(), on_policy=True)


def samples():
    rng, made = np.random.default_rng(3), []
    for length in (18, 24, 15, 21):
        mask, nothing = np.arange(length) >= 5, np.zeros(length, np.float32)
        tokens = rng.integers(0, 40, length).astype(np.int32)
        made.append(Sample(tokens, mask, np.float32(rng.normal()) * mask, nothing))
    return made


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens[None]).long()).logits[0].numpy()


def torch_updates(model):
    """GRPO on what is trained, as its formula says: every token's ratio is 1 and has a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, weight_decay=0.0)
    count = sum(int(sample.mask.sum()) for sample in samples())
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for sample in samples():
            tokens = torch.from_numpy(sample.tokens[None]).long()
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
            weight = torch.from_numpy(sample.advantages[1:] * sample.mask[1:]) / count
            (-torch.exp(chosen - chosen.detach()) * weight).sum().backward()
        norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in trained))
        for parameter in trained:
            parameter.grad *= torch.clamp(OPTIMIZER.max_grad_norm / norm, max=1.0)
        optimizer.step()


def our_updates(policy, params, mesh):
    """The learner and its state after the updates."""
    optimizer = make_optimizer(OPTIMIZER, make_schedule(OPTIMIZER, 10))
    learner = Learner(policy, optimizer, mesh, LearnerOptions(mesh.size))
    state = learner.init(params)
    for _ in range(UPDATES):
        state, metrics = learner.update(state, [pack(samples(), 48)], LOSS)
    assert metrics["actor/grad_norm"] > OPTIMIZER.max_grad_norm  # so that the clipping counts
    return learner, state


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def trained(request, tmp_path_factory):
    """PEFT's model and ours, from PEFT's own files, before and after three updates."""
    kind, fields = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**COMMON | fields)).float()
    model.save_pretrained(folder / "base")
    targets = TARGETS[request.param].split()
    modules = [f"{target}_proj" for target in targets]
    shape = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**shape, init_lora_weights=False))
    model.save_pretrained(folder / "adapter")
    adapters = Adapters(RANK, ALPHA, tuple(sorted(targets)), "float32")
    hf_config = read_hf_config(folder / "base")
    policy = tiny(hf_config, adapters)

    def params(mesh):
        base = load_params(folder / "base", policy, mesh)
        return merge_params(base, load_adapters(folder / "adapter", policy, mesh))

    one_device = single_device()
    tokens = samples()[1].tokens
    logits_before = row_logits(policy, params(one_device), tokens[None])[0], torch_logits(model, tokens)
    torch_updates(model)
    learner, state = our_updates(policy, params(one_device), one_device)
    return SimpleNamespace(**locals())


def test_logits_are_those_of_peft(trained):
    ours, peft_logits = trained.logits_before
    np.testing.assert_allclose(ours, peft_logits, atol=1e-5)
    base = row_logits(trained.policy, trained.learner.base, trained.tokens[None])[0]
    with trained.model.disable_adapter():
        np.testing.assert_allclose(base, torch_logits(trained.model, trained.tokens), atol=1e-5)
    assert np.abs(base - ours).max() > 1e-2


def test_three_updates_are_those_of_torch(trained):
    peft_params = peft.get_peft_model_state_dict(trained.model)
    ours = dict(to_hf(trained.state["params"]))
    assert ours.keys() == peft_params.keys()
    before = dict(to_hf(load_adapters(trained.folder / "adapter", trained.policy, None)))
    for name, array in ours.items():
        np.testing.assert_allclose(array, peft_params[name].numpy(), atol=1e-6, err_msg=name)
        assert np.abs(array - before[name]).max() > 1e-3, name


def test_eight_devices_make_the_updates_of_one(trained):
    if trained.hf_config["model_type"] != "qwen2":
        return  # one layout is enough
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    learner, state = our_updates(trained.policy, trained.params(mesh), mesh)
    assert not learner.base["layers"]["mlp"]["up"]["kernel"].sharding.is_fully_replicated
    params = state["params"], trained.state["params"]
    jax.tree.map(lambda leaf, other: np.testing.assert_allclose(leaf, other, atol=1e-5), *params)


def test_written_files_load_in_peft_and_transformers(trained):
    params = trained.learner.with_base(trained.state["params"])
    expected = row_logits(trained.policy, params, trained.tokens[None])[0]
    folder = save_adapters(trained.state["params"], trained.adapters, "o/n@v1", trained.folder / "ours", None)
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = peft.PeftModel.from_pretrained(load(trained.folder / "base", dtype=torch.float32), folder)
    np.testing.assert_allclose(torch_logits(again, trained.tokens), expected, atol=1e-5)
    named = peft.PeftConfig.from_pretrained(folder)
    assert (named.base_model_name_or_path, named.revision) == ("o/n", "v1")
    merged = trained.policy.fold_adapters(params, "float32")
    whole = save_folder(merged, trained.hf_config, trained.folder / "whole", "float32", None)
    np.testing.assert_allclose(
        torch_logits(load(whole, dtype=torch.float32), trained.tokens), expected, atol=1e-5
    )
