"""The names of all keys, and what somebody may have meant by another name."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError

# What other trainers and papers call a key.
OTHER_NAMES = {
    "batch_size": "rollout.questions_per_step",
    "train_batch_size": "rollout.questions_per_step",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "max_turns": "rollout.max_searches",
    "max_new_tokens": "rollout.max_turn_length",
    "max_response_length": "rollout.max_turn_length",
    "top_n": "retriever.topk",
    "topk_retrieval": "retriever.retrieval_topk",
    "topk_rerank": "retriever.rerank_topk",
    "reranking_topk": "retriever.rerank_topk",
    "select_num": "retriever.rerank_topk",
    "model": "policy.path",
    "model_path": "policy.path",
    "gradient_checkpointing": "policy.remat",
    "lambda": "advantage.target_ratio",
    "adv_estimator": "advantage.name",
    "norm_adv_by_std_in_grpo": "advantage.normalize_std",
    "use_global_std": "advantage.std_over",
    "mini_batch_size": "learner.minibatch_size",
    "ppo_mini_batch_size": "learner.minibatch_size",
    "micro_batch_size": "learner.microbatch_rows",
    "ppo_epochs": "learner.epochs",
    "total_steps": "learner.steps",
    "max_steps": "learner.steps",
    "learning_rate": "learner.optimizer.lr",
    "lr_scheduler": "learner.optimizer.schedule",
    "grad_clip": "learner.optimizer.max_grad_norm",
    "clip_grad": "learner.optimizer.max_grad_norm",
    "clip": "loss.clip_high",
    "clip_ratio": "loss.clip_high",
    "clip_eps": "loss.clip_high",
    "epsilon": "loss.clip_high",
    "kl_beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "entropy_coeff": "loss.entropy_coef",
    "critic_warmup": "critic.warmup_steps",
    "cliprange_value": "critic.clip",
    "vf_clip": "critic.clip",
    "gamma": "advantage.discount",
    "lam": "advantage.gae_lambda",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "test_freq": "evaluate.every",
    "eval_steps": "evaluate.every",
    "output_dir": "run.dir",
}


def known_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every key -> its type, sections included; not the keys of sections in a list."""
    keys: dict[str, Any] = {}
    for name, kind in _fields(section).items():
        keys[prefix + name] = kind
        if isinstance(kind, type):
            keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def marked(mark: Mark, section: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of the keys and sections whose field has this mark; not those inside such a section."""
    found: list[str] = []
    for name, kind in _fields(section).items():
        if mark in section.__pydantic_fields__[name].metadata:  # type: ignore[attr-defined]
            found.append(prefix + name)
        elif isinstance(kind, type):
            found += marked(mark, kind, f"{prefix}{name}.")
    return tuple(found)


def among(keys: Iterable[str], name: str) -> bool:
    """Whether a key or one of its sections is among `keys`."""
    return any(name == one or name.startswith(f"{one}.") for one in keys)


def type_of(dotted: str) -> Any:
    """Declared type of a key such as ``sft.phases.0.steps``; Any if it is unknown or inside a mapping."""
    kind: Any = Config
    for name in filter(None, re.split(r"[.\[\]]+", dotted)):
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
        else:
            kind = _fields(kind).get(name, Any)
    return kind


def refuse_unknown(given: Any, source: str) -> None:
    """Checks the keys of a nested mapping.

    Raises:
        UserError: an unknown key, with `source` and the known key that was probably meant.
    """

    def walk(node: Any, kind: Any, prefix: str) -> None:
        if isinstance(node, list) and typing.get_origin(kind) is list:
            for index, element in enumerate(node):
                walk(element, typing.get_args(kind)[0], f"{prefix}{index}.")
        elif isinstance(node, dict) and (fields := _fields(kind)):
            for name, value in node.items():
                if name not in fields:
                    raise UserError(f"{source}: unknown key {_with_hint(f'{prefix}{name}', value, fields)}")
                walk(value, fields[name], f"{prefix}{name}.")

    walk(given, Config, "")


def _fields(kind: Any) -> dict[str, Any]:
    """Name -> type of a section's keys; none if `kind` is no section."""
    if not is_pydantic_dataclass(kind):
        return {}
    return {name: field.annotation for name, field in kind.__pydantic_fields__.items()}


def _with_hint(dotted: str, value: Any, siblings: dict[str, Any]) -> str:
    """``'learner.lr'; did you mean 'learner.optimizer.lr'?``; a section like none gives its first key."""
    meant = _meant(dotted, isinstance(value, dict), siblings)
    if meant:
        return f"{dotted!r}; did you mean {' or '.join(map(repr, meant))}?"
    if isinstance(value, dict) and value:
        name, inner = next(iter(value.items()))
        return _with_hint(f"{dotted}.{name}", inner, {})
    return f"{dotted!r}; every key is in docs/configuration.md"


def _meant(dotted: str, is_section: bool, siblings: dict[str, Any]) -> list[str]:
    """The known keys that an unknown key may stand for, the likeliest first; empty if nothing is close.

    A key of the same name elsewhere, a key of the same section that is spelled nearly so, a name that the
    field uses for a key of ours, a key anywhere that is spelled nearly so: the first of these that exists.
    """
    section, _, name = dotted.rpartition(".")
    keys = [key for key, kind in known_keys().items() if bool(_fields(kind)) == is_section]
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    if same_name:
        return _nearest_to(section, same_name)
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return [f"{section}.{near[0]}".lstrip(".")]
    if near := difflib.get_close_matches(name, [] if is_section else OTHER_NAMES, n=1, cutoff=0.85):
        return [OTHER_NAMES[near[0]]]
    last = {key.rpartition(".")[2] for key in keys}
    if near := difflib.get_close_matches(name, sorted(last), n=1, cutoff=0.75):
        return _nearest_to(section, [key for key in keys if key.rpartition(".")[2] == near[0]])
    return []


def _nearest_to(section: str, keys: list[str]) -> list[str]:
    """The `keys` inside the section that was named, or of all sections if none is, at most three."""
    top = section.partition(".")[0]
    inside = [key for key in keys if top and key.startswith(f"{top}.")]
    return (inside or keys)[:3]
