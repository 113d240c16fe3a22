"""What can be said of a config without network, services, model or data files; for `doctor --offline`.

Files that are here are looked at; a file that is absent is named as not checked, which is no failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from calibadv_jax.config import Config
from calibadv_jax.config.sections.policy import REST
from calibadv_jax.contrib.planning.fit import cpu_lines, memory_lines
from calibadv_jax.contrib.planning.memory import adapter_lines, estimate_memory, heads_warnings
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.prompts import FROM_DATA, template_text
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.model import has_tokenizer, load_tokenizer
from calibadv_jax.snapshots.huggingface import check_weights, read_hf_config


def check_prompt(config: Config) -> list[str]:
    """The template, and whether the longest trajectory that the limits allow fits."""
    rollout = config.rollout
    searches = rollout.max_searches * (rollout.max_turn_length + rollout.max_observation_length)
    longest = rollout.max_prompt_length + searches + rollout.max_turn_length
    room = f"the longest trajectory has {longest} tokens, and rollout.max_length is {rollout.max_length}"
    if longest > rollout.max_length:
        room += ": a trajectory that is longer ends without an answer"
    if config.prompt.template == FROM_DATA:
        return ["the prompt that each row of the data carries", room]
    text = template_text(config.prompt.template)
    return [f"template of {len(text)} characters, {text.count('<answer>')} answer tags", room]


def check_question_files(config: Config) -> list[str]:
    """Those that are here."""
    lines = []
    for key in ("train", "eval"):
        sources = getattr(config.data, key)
        files = list(sources.values()) if isinstance(sources, dict) else sources
        files = [files] if isinstance(files, str) else files
        if any(files) and all(Path(file).is_file() for file in files):
            questions = load_questions(sources, config.data.columns)
            lines.append(f"data.{key}: {len(questions)} questions in {', '.join(files)}")
            lines += [f"warning: {line}" for line in answer_warnings(questions, f"data.{key}")]
        else:
            lines.append(f"not checked: data.{key}: {', '.join(files) or 'none'} is not here")
    return lines


def check_shape(config: Config) -> list[str]:
    """The policy's shape, the mesh, and the memory of a device."""
    mesh = mesh_sizes(config)
    shards, rows = mesh["data"] * mesh["fsdp"], config.learner.microbatch_rows
    is_counted = REST in config.mesh.sizes.values()
    demand = f"learner.microbatch_rows is {rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards}"
    if rows % shards and not is_counted:
        raise UserError(f"{demand}: set it to {-(-rows // shards) * shards}")
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    counted = ", as many as there are here" if is_counted else ""
    lines = [f"mesh {sizes} = {math.prod(mesh.values())} device(s){counted}"]
    if rows % shards:
        lines.append(f"warning: {demand} on a machine with as many devices")
    architecture = find_architecture(config)
    if architecture is None:
        where = f"{config.policy.path}/config.json is not here" if config.policy.path else "no policy.path"
        return [*lines, f"not checked: memory: {where}, and policy.init gives no whole shape"]
    name = f"{architecture.model_type}, {architecture.num_parameters / 1e6:.2f}M parameters"
    # What does not fit here is no failure: the run may be meant for another machine.
    memory = [
        line.replace("failed: ", "warning: ", 1)
        for line in memory_lines(estimate_memory(config, architecture, mesh), math.prod(mesh.values()))
    ]
    on_cpu = cpu_lines(config) if math.prod(mesh.values()) <= jax.device_count() else []
    return [
        name,
        *_files_here(config, architecture),
        *adapter_lines(config, architecture),
        *lines,
        *memory,
        *heads_warnings(architecture, mesh),
        *on_cpu,
    ]


def _files_here(config: Config, architecture: Architecture) -> list[str]:
    """Tokenizer and tensors, where their folders are here."""
    lines, folder = [], Path(config.policy.path)
    tokenizer = Path(config.policy.tokenizer or folder)
    if (config.policy.tokenizer or config.policy.path) and tokenizer.is_dir() and has_tokenizer(tokenizer):
        lines.append(f"tokenizer of {len(load_tokenizer(tokenizer))} tokens in {tokenizer}")
    if config.policy.path and any(folder.glob("*.safetensors")):
        lines.append(check_weights(folder, Policy(architecture, Numerics.from_config(config.policy))))
    return lines


def check_updates(config: Config) -> list[str]:
    """How a step's trajectories are divided."""
    learner, rollout = config.learner, config.rollout
    trajectories = rollout.questions_per_step * rollout.group_size
    updates = -(-trajectories // (learner.minibatch_size or trajectories)) * learner.epochs
    return [
        f"{learner.steps} steps of {rollout.questions_per_step} questions x {rollout.group_size} ="
        f" {trajectories} trajectories, {updates} update(s) each: {learner.steps * updates} in all"
    ]


def check_services(config: Config) -> list[str]:
    """Which sampler and retriever the run will ask for, and what of them."""
    sampler, retriever = config.sampler, config.retriever
    who = f"{len(sampler.urls) or sampler.workers} vLLM worker(s)" if sampler.name == "vllm" else "in process"
    what = f"the best {retriever.topk} documents, not reranked"
    if retriever.rerank_topk:
        what = f"{retriever.retrieval_topk} documents reranked to {retriever.rerank_topk}"
    where = retriever.url or retriever.corpus or "none yet (set retriever.url or retriever.corpus)"
    return [f"sampler: {who}, {sampler.slots} trajectories together", f"retriever: {where}: {what}"]


def mesh_sizes(config: Config) -> dict[str, int]:
    """Sizes of the mesh's axes; a size of -1 takes the devices of this machine that the other axes leave."""
    return config.mesh.sizes_on(jax.device_count())


def find_architecture(config: Config) -> Architecture | None:
    """Of the policy's folder if it is here, else of policy.init; None if neither says it all.

    Raises:
        UserError: it cannot be used.
    """
    folder, source = Path(config.policy.path), "policy.init"
    hf_config: dict[str, Any] = dict(config.policy.init)
    if config.policy.path and (folder / "config.json").is_file():
        hf_config, source = read_hf_config(folder), f"{folder}/config.json"
    if "vocab_size" not in hf_config:  # as large as the tokenizer, which may not exist yet
        return None
    return architecture_from_hf(hf_config, source)


OFFLINE_CHECKS: list[tuple[str, Callable[[Config], list[str]]]] = [
    ("calibration", describe_choices),
    ("prompt", check_prompt),
    ("questions", check_question_files),
    ("policy", check_shape),
    ("updates", check_updates),
    ("services", check_services),
]
