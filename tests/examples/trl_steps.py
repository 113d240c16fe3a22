"""Two steps of TRL's GRPOTrainer with CalibAdv; run by test_other_trainers.py with TRL on the path."""

import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from scripted import GROUP_SIZE, HITS, STEPS, TEXTS, check_advantages, make_model, make_tokenizer
from trl import GRPOConfig

from examples.trl_calibadv import CalibAdvTrainer, search_rollout


def score(completions: list[str], **_: object) -> list[float]:
    return [float(completion.endswith("<answer>ada</answer>")) for completion in completions]


class Recorder(CalibAdvTrainer):
    """Keeps what each step trains on."""

    steps: list[tuple[torch.Tensor, torch.Tensor, list]] = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"] * output["tool_mask"]
        self.steps.append((output["advantages"], mask, self.records))
        return output


def main(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    before = model.model.embed_tokens.weight.detach().clone()
    texts = iter(TEXTS * STEPS)
    arguments = GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUP_SIZE,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_completion_length=512,
        save_strategy="no",
    )
    trainer = Recorder(
        model,
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "Who wrote it?"}] * 8),
        processing_class=tokenizer,
        rollout_func=search_rollout(HITS.__getitem__, lambda trainer, ids: tokenizer.encode(next(texts))),
    )
    trainer.train()
    assert len(trainer.steps) == STEPS
    for advantages, mask, records in trainer.steps:
        check_advantages(advantages.numpy(), mask.bool().numpy(), records)
    assert not torch.equal(before, model.model.embed_tokens.weight)
    assert all(np.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
