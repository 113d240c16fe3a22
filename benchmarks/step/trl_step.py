"""TRL's side of `beside_trl`, in an environment of its own: needs trl and torch, and nothing of this project.

Reads the rounds' prompts from a JSON file, then a line from stdin for each step; answers each with a line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else idle threads take the other arms' cores

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TRL prints must not stand among the replies
    work = json.loads(arguments.work.read_text())
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    rows = [{"prompt": text} for texts in work["texts"] for text in texts]
    size, group = work["group"] * len(work["texts"][0]), work["group"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            learning_rate=work["lr"],
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            num_generations=group,
            per_device_train_batch_size=arguments.micro,
            gradient_accumulation_steps=size // arguments.micro,
            gradient_checkpointing=arguments.checkpointing,
            max_completion_length=work["tokens"],
            generation_kwargs={"min_new_tokens": work["tokens"]},
            max_steps=len(work["texts"]),
            shuffle_dataset=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Timed(
            model=model,
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Turns(replies)],
        )
        trainer.train()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    return parser.parse_args()


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return share of even tokens: never tied in practice, so that every completion trains on both sides."""
    return [sum(token % 2 == 0 for token in completion) / len(completion) for completion in completion_ids]


class Timed(GRPOTrainer):
    """Takes the time of what comes before the update."""

    sampling, prompts, sampled = 0.0, 0, 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        Timed.sampling += time.perf_counter() - begun
        Timed.prompts += int(made["prompt_mask"].sum())
        Timed.sampled += int(made["completion_mask"].sum())
        return made


class Turns(TrainerCallback):
    """A step waits for its line, and answers it."""

    def __init__(self, replies: Any):
        self.replies, self.begun = replies, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._say(trl=version("trl"), torch=torch.__version__, transformers=version("transformers"))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            sys.exit("the benchmark has ended")
        Timed.sampling, Timed.prompts, Timed.sampled = 0.0, 0, 0
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        total = time.perf_counter() - self.begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._say(
            sampling=Timed.sampling,
            update=total - Timed.sampling,
            prompts=Timed.prompts,
            sampled=Timed.sampled,
            gib=peak,
        )

    def _say(self, **values: Any) -> None:
        print(json.dumps(values), file=self.replies, flush=True)


if __name__ == "__main__":
    main()
