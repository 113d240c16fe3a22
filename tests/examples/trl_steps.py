"""Two steps of TRL's GRPOTrainer with CalibAdv; run by test_other_trainers.py with TRL on the path."""

import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from scripted import GROUP_SIZE, HITS, STEPS, TEXT, check_advantages, make_model, make_tokenizer, score
from trl import GRPOConfig

from examples.trl_calibadv import CalibAdvTrainer, search_rollout


class CheckedTrainer(CalibAdvTrainer):
    steps = 0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        sampled = (output["completion_mask"] * output["tool_mask"]).bool().numpy()
        check_advantages(output["advantages"].numpy(), sampled, self.records)
        self.steps += 1
        return output


def main(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    before = model.model.embed_tokens.weight.detach().clone()
    batch = {"num_generations": GROUP_SIZE, "per_device_train_batch_size": GROUP_SIZE}
    device = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    training = {"max_steps": STEPS, "learning_rate": 1e-2, "max_completion_length": 512}
    arguments = GRPOConfig(str(folder), **batch, **device, **training)
    trainer = CheckedTrainer(
        model,
        reward_funcs=lambda completions, **_: list(map(score, completions)),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "Who wrote it?"}] * 8),
        processing_class=tokenizer,
        rollout_func=search_rollout(HITS.__getitem__, lambda trainer, ids: tokenizer.encode(next(TEXT))),
    )
    trainer.train()
    assert trainer.steps == STEPS
    assert not torch.equal(before, model.model.embed_tokens.weight)
    assert all(np.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
