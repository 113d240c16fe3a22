"""Operations and bytes of a step, counted from shapes, and its seconds at a given efficiency.

A part takes as long as the slowest of three: computing, memory, links.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.hardware import Target, sampler_of
from calibadv_jax.contrib.planning.memory import layer_width, trained_parameters
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import plan, row_shapes
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.attention import keys_computed
from calibadv_jax.policy.transformer import Numerics

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
    rollouts: ExpectedRollouts
    trained: int  # tokens of the rollouts' trajectories
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
    costs = Costs(config, architecture, rollouts.tokens)
    trajectories, epochs = rollouts.trajectories, config.learner.epochs
    size = config.learner.minibatch_size or trajectories
    minibatches = [min(size, trajectories - start) for start in range(0, trajectories, size)]
    # Packing thousands takes a second: once for each number.
    positions = {count: costs.positions(count) for count in {trajectories, *minibatches}}
    computed, whole = epochs * sum(positions[count] for count in minibatches), positions[trajectories]
    updates, parts = epochs * len(minibatches), []
    # Forward passes over a step before its update: old log-probabilities, and a reference's.
    if passes := policy_loss(config).recomputes + (config.loss.kl_coef > 0):
        parts.append(costs.forward("log-probabilities", whole * passes))
    parts.append(costs.update("update", computed))
    if config.advantage.has_critic:
        parts += [costs.forward("critic's values", whole), costs.update("critic's update", computed)]
        updates *= 2
    parts += [costs.apply(updates), *costs.sampling(rollouts, sampler_of(config, target))]
    overlap = config.rollout.max_staleness > 0 and bool(config.sampler.urls)
    trained = trajectories * rollouts.tokens
    return Step(parts, trained * epochs / computed, rollouts, trained, overlap)


class Costs:
    """Counts of a run's programs on its mesh, for trajectories of `tokens`."""

    def __init__(self, config: Config, architecture: Architecture, tokens: int):
        self.config, self.architecture, self.tokens = config, architecture, tokens
        mesh, layers = config.mesh, architecture.num_layers
        self.shards, self.devices = mesh.data * mesh.fsdp, mesh.data * mesh.fsdp * mesh.tensor
        self.fetched = (mesh.fsdp - 1) / mesh.fsdp  # share of the weights that other devices hold
        self.item = jnp.dtype(config.policy.compute_dtype).itemsize
        # Bytes that one device computes with, and elements that it trains.
        self.weights = architecture.num_parameters * self.item / mesh.tensor
        self.trained = trained_parameters(config, architecture) / (mesh.fsdp * mesh.tensor)
        # Bytes for one position on one device: layers and head write and read them; where `tensor` splits
        # layers, they are received twice a layer.
        self.activations = 2 * layers * layer_width(architecture, mesh.sizes) * self.item
        self.activations += 2 * 4 * architecture.vocab_size / mesh.tensor
        self.reduced = 2 * layers * 2 * (1 - 1 / mesh.tensor) * architecture.hidden_size * self.item

    def positions(self, trajectories: int) -> int:
        """Return the positions that the learner computes, those of unfilled rows too."""
        learner = self.config.learner
        shapes = row_shapes(
            learner.pack_length, learner.microbatch_rows, learner.row_widths, self.forward_flops
        )
        return sum(plan([self.tokens] * trajectories, shapes).positions)

    def forward_flops(self, width: int) -> float:
        """Return operations of a position, for the keys that it attends to, or that its kernel computes."""
        numerics = Numerics.from_config(self.config.policy)
        keys = keys_computed(numerics.kernel, width, numerics.attention_chunk)
        return self.architecture.flops_per_token(max(keys, self.tokens / 2))

    def update_flops(self, width: int) -> float:
        """Return operations for one position of a row of `width`: forward, backward and recomputed ones."""
        architecture, policy = self.architecture, self.config.policy
        head = 2.0 * architecture.vocab_size * architecture.hidden_size
        layers = architecture.flops_per_token(0) - head
        attention = self.forward_flops(width) - architecture.flops_per_token(0)
        backward = 1 if policy.lora.rank else 2  # to the inputs, and to the weights
        attention_backward = FLASH_BACKWARD if policy.attention in ("splash", "triton") else 2
        return (
            layers * (1 + backward + (policy.remat == "full"))
            + attention * (1 + attention_backward + (policy.remat != "none"))
            + head * (1 + backward + (width > policy.logprob_chunk))
        )

    def forward(self, name: str, positions: float) -> Part:
        learner = self.config.learner
        rounds, held = positions / (learner.microbatch_rows * learner.pack_length), positions / self.shards
        memory = rounds * self.weights + held * self.activations
        received = rounds * self.fetched * self.weights + held * self.reduced
        return Part(name, positions * self.forward_flops(learner.pack_length), memory, received, self.devices)

    def update(self, name: str, positions: float) -> Part:
        """Count the gradients of these positions, added up."""
        learner, mesh = self.config.learner, self.config.mesh
        rounds, held = positions / (learner.microbatch_rows * learner.pack_length), positions / self.shards
        passes = 2 + (self.config.policy.remat == "full")
        gradients = 4 * self.trained  # bytes in float32, of one device
        memory = rounds * (passes * self.weights + 3 * gradients) + (1 + passes) * held * self.activations
        # Weights come for the forward and for the backward pass; gradients go back to those who hold them.
        gathered = 2 * self.weights + self.trained * mesh.fsdp * self.item
        received = rounds * self.fetched * gathered
        received += rounds * 2 * (1 - 1 / mesh.data) * gradients
        received += held * passes * self.reduced
        return Part(name, positions * self.update_flops(learner.pack_length), memory, received, self.devices)

    def apply(self, updates: int) -> Part:
        """Count the optimizer's steps: parameters and two moments read and written, the sum read twice."""
        stored = jnp.dtype(self.config.policy.param_dtype).itemsize
        flops = 20.0 * updates * self.trained * self.devices
        return Part("optimizer's step", flops, updates * self.trained * (6 * stored + 8), 0.0, self.devices)

    def sampling(self, rollouts: ExpectedRollouts, process: Config) -> list[Part]:
        """Count prefill, where every token is computed once, and decoding of all slots of `sampler_of`."""
        architecture, sampler, count = self.architecture, self.config.sampler, rollouts.trajectories
        if sampler.name == "jax":
            devices, slots, item = self.devices, sampler.slots, self.item
            split = process.mesh.fsdp * process.mesh.tensor
        else:
            workers = len(sampler.urls) or sampler.workers
            item = jnp.dtype(self.config.sampler_dtype).itemsize
            split = len(sampler.worker_devices[0].split(",")) if sampler.worker_devices else 1
            devices, slots = workers * split, sampler.slots * workers
        slots = min(slots, count, self.config.rollout.max_concurrency)
        context = rollouts.tokens / 2
        flops, weights = architecture.flops_per_token(context), architecture.num_parameters * item / split
        head_elements = architecture.num_kv_heads * architecture.head_dim
        cached = 2 * architecture.num_layers * head_elements * item * context * slots / devices
        calls = count * rollouts.sampled / slots  # of decoding, each a token of every slot
        prefilled = count * (rollouts.tokens - rollouts.sampled)
        prefill = Part("prefill", prefilled * flops, prefilled * self.activations / devices, 0.0, devices)
        decode = Part("decode", count * rollouts.sampled * flops, calls * (weights + cached), 0.0, devices)
        return [prefill, decode]
