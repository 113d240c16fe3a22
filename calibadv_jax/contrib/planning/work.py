"""Operations and bytes of a step, counted from shapes, and its seconds at a given efficiency.

A part takes as long as the slowest of three: computing, memory, links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.hardware import Target, sampler_of
from calibadv_jax.contrib.planning.memory import layer_width, trained_parameters
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import plan, row_shapes
from calibadv_jax.learner.losses import policy_loss
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.transformer import Numerics, keys_computed

FLASH_BACKWARD = 2.5  # times the forward pass: the scores are computed once more


@dataclass(frozen=True)
class ExpectedRollouts:
    trajectories: int
    tokens: int  # of each, its prompt and observations too
    sampled: int  # of these, written by the policy


@dataclass(frozen=True)
class Part:
    name: str
    flops: float  # on all its devices
    memory: float  # bytes that one device reads and writes
    received: float  # bytes that one device receives from others
    devices: int

    def seconds(self, target: Target, efficiency: float) -> float:
        computing = self.flops / self.devices / target.chip.flops
        transfer = max(self.memory / target.chip.bandwidth, self.received / target.links)
        return max(computing, transfer) / efficiency


@dataclass(frozen=True)
class Step:
    parts: list[Part]
    fill: float  # share of the update's positions that holds tokens
    trained: int  # tokens of a step's trajectories
    overlap: bool  # whether rollouts and update go on at the same time, on devices of their own

    def seconds(self, target: Target, efficiency: float) -> float:
        times = {part.name: part.seconds(target, efficiency) for part in self.parts}
        sampling = sum(times.pop(name, 0.0) for name in ("prefill", "decode"))
        return max(sampling, sum(times.values())) if self.overlap else sampling + sum(times.values())


def expected_rollouts(config: Config, tokens: int = 0, sampled: int = 0) -> ExpectedRollouts:
    """Return a step's trajectories, by default (0) the longest that the config allows."""
    rollout, most = config.rollout, config.rollout.max_length
    turns = (rollout.max_searches + 1) * rollout.max_turn_length
    observations = rollout.max_searches * rollout.max_observation_length
    if tokens > most:
        raise UserError(f"--tokens {tokens}: a trajectory has at most rollout.max_length = {most}")
    tokens = tokens or min(most, rollout.max_prompt_length + turns + observations)
    if sampled >= tokens:
        raise UserError(f"--sampled {sampled}: must be below the {tokens} tokens of a trajectory")
    count = rollout.questions_per_step * rollout.group_size
    return ExpectedRollouts(count, tokens, sampled or min(turns, tokens - 1))


def step_of(config: Config, architecture: Architecture, rollouts: ExpectedRollouts, target: Target) -> Step:
    """Count the parts of a step; the config is `placed_on` the target."""
    costs, trajectories = Costs(config, architecture, rollouts.tokens), rollouts.trajectories
    size = config.learner.minibatch_size or trajectories
    starts = [*range(0, trajectories, size)] * config.learner.epochs
    computed = sum(costs.positions(min(size, trajectories - start)) for start in starts)
    whole, parts, updates = costs.positions(trajectories), [], len(starts)
    # Forward passes over a step before its update: old log-probabilities, and a reference's.
    if passes := policy_loss(config).recomputes + (config.loss.kl_coef > 0):
        parts.append(costs.forward("log-probabilities", whole * passes))
    parts.append(costs.update(computed))
    if config.advantage.has_critic:
        parts += [costs.forward("critic's values", whole), costs.update(computed, "critic's update")]
        updates *= 2
    parts += [costs.apply(updates), *costs.sampling(rollouts, sampler_of(config, target))]
    overlap = config.rollout.max_staleness > 0 and bool(config.sampler.urls)
    trained = trajectories * rollouts.tokens
    return Step(parts, trained * config.learner.epochs / computed, trained, overlap)


class Costs:
    """Counts of a run's programs on its mesh, for trajectories of `tokens`."""

    def __init__(self, config: Config, architecture: Architecture, tokens: int):
        self.config, self.architecture, self.tokens = config, architecture, tokens
        mesh, policy = config.mesh, config.policy
        self.mesh, self.shards = mesh.sizes, mesh.data * mesh.fsdp
        self.devices = math.prod(self.mesh.values())
        self.computed = jnp.dtype(policy.compute_dtype).itemsize
        self.stored = jnp.dtype(policy.param_dtype).itemsize
        self.split = (mesh.fsdp - 1) / mesh.fsdp
        self._positions: dict[int, int] = {}  # packing thousands takes a second

    def positions(self, trajectories: int) -> int:
        """Return the positions that the learner computes, those of unfilled rows too."""
        if trajectories not in self._positions:
            learner = self.config.learner
            shapes = row_shapes(learner.row_length, learner.microbatch_rows, learner.row_widths, self._pass)
            self._positions[trajectories] = sum(plan([self.tokens] * trajectories, shapes).positions)
        return self._positions[trajectories]

    def _pass(self, width: int) -> float:
        """Return operations of a position, for the keys that it attends to, or that its kernel computes."""
        numerics = Numerics.from_config(self.config.policy)
        keys = keys_computed(numerics.kernel, width, numerics.attention_chunk)
        return self.architecture.flops_per_token(max(keys, self.tokens / 2))

    def forward(self, name: str, positions: float) -> Part:
        width = self.config.learner.row_length
        rounds = positions / (self.config.learner.microbatch_rows * width)
        mine = positions / self.shards
        memory = rounds * self._weights() + mine * self._activations()
        received = rounds * self.split * self._weights() + mine * self._reduced()
        return Part(name, positions * self._pass(width), memory, received, self.devices)

    def update_flops(self, width: int) -> float:
        """Return operations for one position of a row of `width`: forward, backward and recomputed ones."""
        a, policy = self.architecture, self.config.policy
        head = 2.0 * a.vocab_size * a.hidden_size
        layers = a.flops_per_token(0) - head
        attention = self._pass(width) - a.flops_per_token(0)
        backward = 1 if policy.lora.rank else 2  # to the inputs, and to the weights
        of_attention = FLASH_BACKWARD if policy.attention in ("splash", "triton") else 2
        return (
            layers * (1 + backward + (policy.remat == "full"))
            + attention * (1 + of_attention + (policy.remat != "none"))
            + head * (1 + backward + (width > policy.logprob_chunk))
        )

    def update(self, positions: int, name: str = "update") -> Part:
        """Count the gradients of these positions, added up."""
        learner, policy = self.config.learner, self.config.policy
        rounds = positions / (learner.microbatch_rows * learner.row_length)
        again = policy.remat == "full"
        mine, weights = positions / self.shards, self._weights()
        gradients = 4 * self._trained()  # float32, of one device
        memory = rounds * ((2 + again) * weights + 3 * gradients) + (3 + again) * mine * self._activations()
        # Weights come for the forward and for the backward pass; gradients go back to those who hold them.
        gathered = 2 * weights + self._trained() * self.mesh["fsdp"] * self.computed
        received = rounds * self.split * gathered
        received += rounds * 2 * (1 - 1 / self.mesh["data"]) * gradients
        received += mine * (2 + again) * self._reduced()
        flops = positions * self.update_flops(learner.row_length)
        return Part(name, flops, memory, received, self.devices)

    def apply(self, updates: int) -> Part:
        """Count the optimizer's steps: parameters and two moments read and written, the sum read twice."""
        held = self._trained()
        flops = 20.0 * updates * held * self.devices
        return Part("optimizer's step", flops, updates * held * (6 * self.stored + 8), 0.0, self.devices)

    def sampling(self, rollouts: ExpectedRollouts, own: Config) -> list[Part]:
        """Count prefill, where every token is computed once, and decoding of all slots of `sampler_of`."""
        config, a, sampler, count = self.config, self.architecture, self.config.sampler, rollouts.trajectories
        context = rollouts.tokens / 2
        if sampler.name == "jax":
            devices, slots, width = self.devices, sampler.slots, self.computed
            split = own.mesh.fsdp * own.mesh.tensor
        else:
            workers, width = len(sampler.urls) or sampler.workers, jnp.dtype(config.sampler_dtype).itemsize
            split = len(sampler.worker_devices[0].split(",")) if sampler.worker_devices else 1
            devices, slots = workers * split, sampler.slots * workers
        slots = min(slots, count, config.rollout.max_concurrency)
        flops, weights = a.flops_per_token(context), a.num_parameters * width / split
        cached = 2 * a.num_layers * a.num_kv_heads * a.head_dim * width * context * slots / devices
        calls = count * rollouts.sampled / slots  # of decoding, each a token of every slot
        prefilled = count * (rollouts.tokens - rollouts.sampled)
        prefill = Part("prefill", prefilled * flops, prefilled * self._activations() / devices, 0.0, devices)
        decode = Part("decode", count * rollouts.sampled * flops, calls * (weights + cached), 0.0, devices)
        return [prefill, decode]

    def _weights(self) -> float:
        """Return bytes of the weights that a device computes with: one part of `tensor`."""
        return self.architecture.num_parameters * self.computed / self.mesh["tensor"]

    def _trained(self) -> float:
        trained = trained_parameters(self.config, self.architecture)
        return trained / (self.mesh["fsdp"] * self.mesh["tensor"])

    def _activations(self) -> float:
        """Return bytes that the layers and the head write and read for one position on one device."""
        a, tensor = self.architecture, self.mesh["tensor"]
        layers = 2 * a.num_layers * layer_width(a, self.mesh) * self.computed
        return layers + 2 * 4 * a.vocab_size / tensor

    def _reduced(self) -> float:
        """Return bytes that a device receives for a position where `tensor` splits layers: twice a layer."""
        a, tensor = self.architecture, self.mesh["tensor"]
        return 2 * a.num_layers * 2 * (1 - 1 / tensor) * a.hidden_size * self.computed
