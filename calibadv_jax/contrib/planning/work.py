"""Operations and bytes of a step, counted from shapes, and its seconds at a given efficiency.

A part of a step takes as long as the slowest of three: computing, memory, links.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.efficiency import Efficiency
from calibadv_jax.contrib.planning.hardware import Target, sampler_of
from calibadv_jax.contrib.planning.memory import layer_width, trained_parameters
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import plan, row_shapes
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.attention import keys_computed
from calibadv_jax.policy.transformer import Numerics

# Work of the backward pass of a flash kernel, in forward passes: the scores are computed once more.
FLASH_BACKWARD = 2.5
FLASH_KERNELS = ("splash", "triton", "tokamax")
RECOMPUTED_LAYERS = ("full", "attention")  # Settings of policy.remat with a second forward pass.
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ExpectedRollouts:
    """The trajectories of a step, all of one length."""

    trajectories: int
    tokens: int  # tokens of each trajectory, including prompt and observations
    sampled: int  # tokens of each trajectory that the policy writes


@dataclass(frozen=True)
class Part:
    """A part of a step: a program with all of its calls."""

    name: str
    flops: float  # operations on all its devices
    memory: float  # bytes that one device reads and writes
    received: float  # bytes that one device receives from others
    devices: int

    def seconds(self, target: Target, efficiency: float) -> float:
        """Return the time of the part.

        Args:
            target: The devices.
            efficiency: Share of the devices' rates that is reached, in (0, 1].
        """
        computing = self.flops / self.devices / target.chip.flops
        accessing = self.memory / target.chip.bandwidth
        receiving = self.received / target.links
        return max(computing, accessing, receiving) / efficiency


@dataclass(frozen=True)
class Step:
    """The parts of a step, and what they work on."""

    parts: list[Part]
    fill: float  # share of the update's positions that holds tokens
    rollouts: ExpectedRollouts
    trained: int  # tokens of the rollouts' trajectories
    overlap: bool  # whether rollouts and update run at the same time, on devices of their own

    def seconds(self, target: Target, efficiency: Efficiency) -> float:
        """Return the time of the step.

        Args:
            target: The devices.
            efficiency: Share of the devices' rates that each part reaches.
        """
        times = {part.name: part.seconds(target, efficiency.of(part.name)) for part in self.parts}
        sampling = times.pop("prefill", 0.0) + times.pop("decode", 0.0)
        training = sum(times.values())
        if self.overlap:
            return max(sampling, training)
        return sampling + training


def expected_rollouts(config: Config, tokens: int = 0, sampled: int = 0) -> ExpectedRollouts:
    """Return a step's trajectories.

    Args:
        config: The run's config.
        tokens: Tokens of a trajectory; 0: the most that the config allows.
        sampled: Tokens of a trajectory that the policy writes; 0: the most that the config allows.

    Raises:
        UserError: The config does not allow so many tokens.
    """
    rollout = config.rollout
    if tokens > rollout.max_length:
        raise UserError(
            f"--tokens {tokens}: a trajectory has at most rollout.max_length = {rollout.max_length}"
        )
    most_sampled = (rollout.max_searches + 1) * rollout.max_turn_length
    most_observed = rollout.max_searches * rollout.max_observation_length
    if not tokens:
        tokens = min(rollout.max_length, rollout.max_prompt_length + most_sampled + most_observed)
    if sampled >= tokens:
        raise UserError(f"--sampled {sampled}: must be below the {tokens} tokens of a trajectory")
    if not sampled:
        sampled = min(most_sampled, tokens - 1)
    return ExpectedRollouts(rollout.questions_per_step * rollout.group_size, tokens, sampled)


def step_of(config: Config, architecture: Architecture, rollouts: ExpectedRollouts, target: Target) -> Step:
    """Count the parts of a step.

    Args:
        config: The run's config, `placed_on` the target.
        architecture: The policy's architecture.
        rollouts: The trajectories of the step.
        target: The devices.
    """
    costs = Costs(config, architecture, rollouts.tokens)
    num_trajectories = rollouts.trajectories
    epochs = config.learner.epochs
    size = config.learner.minibatch_size or num_trajectories
    minibatches = [
        min(size, num_trajectories - start) for start in range(0, num_trajectories, size)
    ]  # trajectories of each
    # Positions by number of trajectories: packing thousands of them takes a second.
    positions = {count: costs.positions(count) for count in {num_trajectories, *minibatches}}
    step_positions = positions[num_trajectories]
    update_positions = epochs * sum(positions[count] for count in minibatches)
    num_updates = epochs * len(minibatches)
    parts = []
    # Forward passes over a step before its update: old log-probabilities, those of a reference, and those of
    # a teacher, which counts as large as the policy.
    num_passes = policy_loss(config).recomputes + (config.loss.kl_coef > 0) + bool(config.teacher.policy)
    if num_passes:
        parts.append(costs.forward("log-probabilities", step_positions * num_passes))
    parts.append(costs.update("update", update_positions))
    if config.advantage.has_critic:
        parts.append(costs.forward("critic's values", step_positions))
        parts.append(costs.update("critic's update", update_positions))
        num_updates *= 2
    parts.append(costs.apply(num_updates))
    parts.extend(costs.sampling(rollouts, sampler_of(config, target)))
    num_tokens = num_trajectories * rollouts.tokens
    return Step(
        parts,
        fill=num_tokens * epochs / update_positions,
        rollouts=rollouts,
        trained=num_tokens,
        overlap=config.rollout.max_staleness > 0 and bool(config.sampler.urls),
    )


class Costs:
    """Counts of a run's programs on its mesh.

    Args:
        config: The run's config, `placed_on` a target.
        architecture: The policy's architecture.
        tokens: Tokens of a trajectory.
    """

    def __init__(self, config: Config, architecture: Architecture, tokens: int):
        self.config = config
        self.architecture = architecture
        self.tokens = tokens
        mesh = config.mesh
        layers = architecture.num_layers
        self.shards = mesh.data * mesh.fsdp  # of a microbatch
        self.devices = mesh.data * mesh.fsdp * mesh.tensor
        self.fetched = (mesh.fsdp - 1) / mesh.fsdp  # share of the weights that other devices hold
        self.item = jnp.dtype(config.policy.compute_dtype).itemsize
        # Bytes of the weights that one device computes with.
        self.weights = architecture.num_parameters * self.item / mesh.tensor
        # Elements that one device trains.
        self.trained = trained_parameters(config, architecture) / (mesh.fsdp * mesh.tensor)
        # Bytes that the layers and the head write and read for one position on one device.
        self.activations = 2 * layers * layer_width(architecture, mesh.sizes) * self.item
        self.activations += 2 * FLOAT32_BYTES * architecture.vocab_size / mesh.tensor
        # Bytes that one device receives for one position, twice a layer, if `tensor` splits the layers.
        others = 1 - 1 / mesh.tensor  # share of the results that other devices compute
        self.reduced = 2 * layers * 2 * others * architecture.hidden_size * self.item

    def positions(self, trajectories: int) -> int:
        """Return the positions that the learner computes, those of unfilled rows too."""
        learner = self.config.learner
        shapes = row_shapes(
            learner.pack_length, learner.microbatch_rows, learner.row_widths, self.forward_flops
        )
        return sum(plan([self.tokens] * trajectories, shapes).positions)

    def forward_flops(self, width: int) -> float:
        """Return the operations of the forward pass for one position of a row of `width` tokens.

        Attention counts the keys that the position attends to, or those that its kernel computes.
        """
        numerics = Numerics.from_config(self.config.policy)
        keys = keys_computed(numerics.kernel, width, numerics.attention_chunk)
        return self.architecture.flops_per_token(max(keys, self.tokens / 2))

    def update_flops(self, width: int) -> float:
        """Return operations for one position of a row of `width`: forward, backward and recomputed ones."""
        architecture = self.architecture
        policy = self.config.policy
        head = 2.0 * architecture.vocab_size * architecture.hidden_size
        layers = architecture.flops_per_token(0) - head
        attention = self.forward_flops(width) - architecture.flops_per_token(0)
        backward = 1 if policy.lora.rank else 2  # gradients of the inputs, and of the weights
        attention_backward = FLASH_BACKWARD if policy.attention in FLASH_KERNELS else 2
        recomputes_layers = policy.remat in RECOMPUTED_LAYERS
        recomputes_attention = policy.remat == "full"
        recomputes_head = width > policy.logprob_chunk
        return (
            layers * (1 + backward + recomputes_layers)
            + attention * (1 + attention_backward + recomputes_attention)
            + head * (1 + backward + recomputes_head)
        )

    def _rounds(self, positions: float) -> float:
        """Return the number of microbatches of full rows that hold these positions."""
        learner = self.config.learner
        return positions / (learner.microbatch_rows * learner.pack_length)

    def forward(self, name: str, positions: float) -> Part:
        """Count the forward passes over these positions."""
        rounds = self._rounds(positions)
        held = positions / self.shards  # positions of one device
        flops = positions * self.forward_flops(self.config.learner.pack_length)
        memory = rounds * self.weights + held * self.activations
        received = rounds * self.fetched * self.weights + held * self.reduced
        return Part(name, flops, memory, received, self.devices)

    def update(self, name: str, positions: float) -> Part:
        """Count the gradients of these positions, added up."""
        mesh = self.config.mesh
        rounds = self._rounds(positions)
        held = positions / self.shards  # positions of one device
        passes = 2 + (self.config.policy.remat in RECOMPUTED_LAYERS)
        gradients = FLOAT32_BYTES * self.trained  # bytes on one device
        flops = positions * self.update_flops(self.config.learner.pack_length)
        memory = rounds * (passes * self.weights + 3 * gradients)
        memory += (1 + passes) * held * self.activations
        # Weights are gathered for the forward and for the backward pass; gradients return to their devices.
        gathered = 2 * self.weights + self.trained * mesh.fsdp * self.item
        received = rounds * self.fetched * gathered
        received += rounds * 2 * (1 - 1 / mesh.data) * gradients
        received += held * passes * self.reduced
        return Part(name, flops, memory, received, self.devices)

    def apply(self, updates: int) -> Part:
        """Count the optimizer's steps: parameters and two moments read and written, the sum read twice."""
        stored = jnp.dtype(self.config.policy.param_dtype).itemsize
        flops = 20.0 * updates * self.trained * self.devices
        memory = updates * self.trained * (6 * stored + 2 * FLOAT32_BYTES)
        return Part("optimizer's step", flops, memory, 0.0, self.devices)

    def sampling(self, rollouts: ExpectedRollouts, process: Config) -> list[Part]:
        """Count prefill, where every token is computed once, and decoding of all slots.

        Args:
            rollouts: The trajectories of the step.
            process: The config of one process' embedded sampler (`sampler_of`).
        """
        architecture = self.architecture
        sampler = self.config.sampler
        if sampler.name == "jax":
            devices = self.devices
            slots = sampler.slots
            item = self.item
            split = process.mesh.fsdp * process.mesh.tensor  # devices that share a copy of the weights
        else:
            num_workers = len(sampler.urls) or sampler.workers
            item = jnp.dtype(self.config.sampler_dtype).itemsize
            split = 1
            if sampler.worker_devices:
                split = len(sampler.worker_devices[0].split(","))
            devices = num_workers * split
            slots = sampler.slots * num_workers
        slots = min(slots, rollouts.trajectories, self.config.rollout.max_concurrency)
        context = rollouts.tokens / 2  # mean number of keys
        flops = architecture.flops_per_token(context)
        weights = architecture.num_parameters * item / split
        head_elements = architecture.num_kv_heads * architecture.head_dim
        cached = 2 * architecture.num_layers * head_elements * item * context * slots / devices
        num_sampled = rollouts.trajectories * rollouts.sampled
        num_calls = num_sampled / slots  # each writes a token of every slot
        num_prefilled = rollouts.trajectories * (rollouts.tokens - rollouts.sampled)
        prefill_memory = num_prefilled * self.activations / devices
        decode_memory = num_calls * (weights + cached)
        return [
            Part("prefill", num_prefilled * flops, prefill_memory, 0.0, devices),
            Part("decode", num_sampled * flops, decode_memory, 0.0, devices),
        ]
