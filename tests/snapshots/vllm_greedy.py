"""Greedy tokens of HuggingFace folders in vLLM: python vllm_greedy.py FOLDER

FOLDER/prompts.json has prompts by NAME. Continues them by eight tokens with FOLDER/NAME, and writes
FOLDER/tokens.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def main(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    tokens = {}
    for name, prompts in json.loads((folder / "prompts.json").read_text()).items():
        options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "generation_config": "vllm"}
        engine = LLM(str(folder / name), skip_tokenizer_init=True, enforce_eager=True, **options)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        tokens[name] = [list(prompt.outputs[0].token_ids) for prompt in engine.generate(asked, greedy)]
        del engine
        cleanup_dist_env_and_memory()
    (folder / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
