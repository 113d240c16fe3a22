"""Whether a policy's thoughts stay language while it is trained, and whether they still say something.

    python -m experiments.language RUN [RUN …] --model FOLDER [--window 5] [--of-group 1]

A judge, the HuggingFace folder FOLDER (the model before any training), reads the thoughts that a run kept
(rollouts/). Of each window of steps: perplexity of the thoughts alone, without what stands before them;
perplexity in their place, after prompt, searches and passages, where a quote is nearly free; tokens of a
thought; share of last thoughts that say the question again. The judge runs in PyTorch.

A thought that is never closed counts nowhere here; the run's format validity shows it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.tags import OPEN_THINK, leaves_thought_open
from calibadv_jax.core.trajectory import Trajectory, Turn
from calibadv_jax.metrics.console import table
from calibadv_jax.rollout_store.reader import read_step
from calibadv_jax.rollout_store.schema import kept_steps
from experiments.runs import whole_number


@dataclass
class Judge:
    """A causal language model and its tokenizer."""

    model: Any
    tokenizer: Any

    @staticmethod
    def load(folder: Path) -> Judge:
        """Load the judge of a HuggingFace folder, in float32."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return Judge(model, AutoTokenizer.from_pretrained(folder))

    def logprobs(self, token_ids: np.ndarray, start: int) -> np.ndarray:
        """Return float32 [T - start]: log-probabilities of the tokens from `start`, at least 1, in nats."""
        import torch

        ids = torch.from_numpy(token_ids.astype(np.int64))
        with torch.inference_mode():
            predicts = torch.arange(start - 1, len(ids) - 1)
            logits = self.model(ids[None], logits_to_keep=predicts).logits[0].float()
            return logits.log_softmax(-1).gather(-1, ids[start:, None])[:, 0].numpy()


@dataclass
class Window:
    """Sums over the thoughts of some steps."""

    alone: list[np.ndarray] = field(default_factory=list)
    in_place: list[np.ndarray] = field(default_factory=list)
    repeats: list[bool] = field(default_factory=list)  # of the last thoughts

    def add(self, judge: Judge, trajectory: Trajectory) -> None:
        sequence = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        spans = list(thoughts(judge.tokenizer, trajectory))
        if not spans:
            return
        begin = spans[0][0].start
        logprobs = judge.logprobs(sequence[: spans[-1][0].stop], begin)
        for place, text in spans:
            self.in_place.append(logprobs[place.start - begin : place.stop - begin])
            ids = np.asarray(judge.tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(ids) > 1:
                self.alone.append(judge.logprobs(ids, 1))
        self.repeats.append(normalise_answer(trajectory.question.text) in normalise_answer(spans[-1][1]))

    def row(self) -> list[float | str]:
        tokens = sum(map(len, self.in_place))
        shown = [perplexity(self.alone), perplexity(self.in_place), tokens / max(1, len(self.in_place))]
        return [len(self.in_place), *shown, sum(self.repeats) / max(1, len(self.repeats))]


def perplexity(logprobs: Sequence[np.ndarray]) -> float:
    """Return the perplexity over all tokens; NaN of none."""
    tokens = sum(map(len, logprobs))
    return math.exp(-sum(float(logprob.sum()) for logprob in logprobs) / tokens) if tokens else math.nan


def thoughts(tokenizer: Any, trajectory: Trajectory) -> Iterator[tuple[slice, str]]:
    """Yield the place of each thought in prompt and response, and its text; empty ones are left out."""
    begin = len(trajectory.prompt_ids)
    for number, turn in enumerate(trajectory.turns):
        if turn.think:
            is_open = leaves_thought_open(trajectory.opening_of(number))
            place = within(tokenizer, turn, "" if is_open else OPEN_THINK)
            yield slice(begin + place.start, begin + place.stop), turn.think
        begin += len(turn.token_ids) + len(turn.observation_ids)


def within(tokenizer: Any, turn: Turn, tag: str) -> slice:
    """Return the tokens of a turn that hold a character of its thought, which follows `tag`."""
    ends = [len(tokenizer.decode(turn.token_ids[: end + 1])) for end in range(len(turn.token_ids))]
    text = tokenizer.decode(turn.token_ids)
    begin = text.index(turn.think, text.index(tag) + len(tag))
    first, last = np.searchsorted(ends, [begin + 1, begin + len(turn.think)])
    # Of a character that is cut over tokens, each prefix decodes to as many characters as the whole.
    last = max(last, np.searchsorted(ends, begin + len(turn.think), side="right") - 1)
    return slice(int(first), int(last) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--model", type=Path, required=True, help="HuggingFace folder of the judge")
    parser.add_argument(
        "--window", type=whole_number, default=5, help="steps of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--of-group",
        type=whole_number,
        default=1,
        help="trajectories of each group that are read (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(
            f"--model {arguments.model}: no config.json there; give the HuggingFace folder of the judge"
        )
    judge = Judge.load(arguments.model)
    rows = [
        [run.as_posix(), steps, *window.row()]
        for run in arguments.runs
        for steps, window in windows(judge, run, arguments.window, arguments.of_group)
    ]
    headers = ["run", "steps", "thoughts", "alone", "in place", "tokens", "repeat the question"]
    sys.stdout.write(table(rows, headers) + "\n")


def windows(judge: Judge, run: Path, width: int, of_group: int) -> Iterator[tuple[str, Window]]:
    kept = list(kept_steps(run).items())
    if not kept:
        sys.exit(f"{run}: no trajectories are kept there")
    for begin in range(0, len(kept), width):
        window, chosen = Window(), kept[begin : begin + width]
        for _, path in chosen:
            for group in read_step(path).groups:
                for trajectory in group.trajectories[:of_group]:
                    window.add(judge, trajectory)
        yield f"{chosen[0][0]} to {chosen[-1][0]}", window


if __name__ == "__main__":
    main()
