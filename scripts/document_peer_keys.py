"""Write docs/coming_from.md from the table of calibadv_jax/config/peer_keys.yaml.

Run from the repository root:

python -m scripts.document_peer_keys            write the page
python -m scripts.document_peer_keys --check    exit 1 where the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibadv_jax.config.keys import PEER_PAGE, PeerKey, find_peer_keys, peer_keys
from scripts.generated_page import write_or_check

PAGE = Path(__file__).resolve().parent.parent / PEER_PAGE
# Trainers of a column: the authors' code of CalibAdv and Search-R1 are forks of verl.
COLUMNS = (("verl", "Search-R1", "CalibAdv's authors"), ("RLinf",), ("TRL",), ("Tunix",))
# Keys of this project that most runs set, in the order of the page.
COMMON = (
    "policy.path",
    "policy.remat",
    "policy.lora.rank",
    "data.train",
    "data.eval",
    "data.eval_limit",
    "rollout.questions_per_step",
    "rollout.group_size",
    "rollout.max_searches",
    "rollout.max_prompt_length",
    "rollout.max_turn_length",
    "rollout.max_observation_length",
    "rollout.max_length",
    "sampler.name",
    "sampler.worker_args",
    "retriever.url",
    "retriever.topk",
    "reward.answer",
    "advantage.name",
    "loss.name",
    "loss.aggregation",
    "loss.clip_high",
    "loss.kl_coef",
    "loss.entropy_coef",
    "learner.steps",
    "learner.minibatch_size",
    "learner.epochs",
    "learner.microbatch_rows",
    "learner.optimizer.lr",
    "learner.optimizer.warmup_updates",
    "learner.optimizer.max_grad_norm",
    "learner.optimizer.offload",
    "mesh.fsdp",
    "mesh.tensor",
    "run.dir",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluate.every",
    "log.backends",
)
# Names that two trainers of one column use for different things -> the trainer whose name it is.
AMBIGUOUS = {("data.max_prompt_length", "rollout.max_length"): "Search-R1"}
HEADER = """# Coming from Search-R1, verl, RLinf, TRL or Tunix

For people who have a config of another trainer: the keys that most runs set and that have another name
here. Whole configs, side by side: [migration.md](migration.md). The full table has {number} keys. To ask it,
give the other trainer's key: the refusal names the key of this project.

```bash
calibadv train --config configs/own_data.yaml n_agent=5 --dry-run    # error: … rollout.group_size …
```

The end of a name is enough, as in the table below: `n_agent` is `actor_rollout_ref.rollout.n_agent`.
Search-R1 and the CalibAdv authors' code are forks of verl and share its column. Generated from
`calibadv_jax/config/peer_keys.yaml` by `python -m scripts.document_peer_keys`. All keys of this project:
[configuration.md](configuration.md).

| here | verl, Search-R1, CalibAdv's authors | RLinf | TRL | Tunix |
|---|---|---|---|---|
"""
FOOTER = """
- **Batches.** `learner.minibatch_size` counts trajectories, `learner.microbatch_rows` packed rows of
  `learner.pack_length` tokens. Rows are always packed.
- **Lengths.** `rollout.max_turn_length` limits a turn, `rollout.max_length` the whole trajectory.
- **Steps.** `learner.steps` is epochs × questions / `rollout.questions_per_step`. Warm-up is a number of
  updates.

## Data and servers

- **Rows.** Parquet and JSON lines of Search-R1, verl, SkyRL, RLinf and TRL are read as they are:
  `data.train=train.parquet`. The first row decides the layout
  ([layouts of question files](data.md#layouts)).
- **Corpus and index.** Search-R1's corpus and E5 index are served by `scripts/launch_retriever.sh`
  ([retrieval service](retriever.md)).
- **Servers.** A running Search-R1 server is used with `retriever.url=http://HOST:PORT`, without
  `/retrieve`. Running vLLM workers: `sampler.urls` ([vLLM workers](rollouts.md#vllm-workers)).
- **Runs.** `configs/search_r1.yaml` and `configs/rlinf.yaml` are those projects' runs in the keys of this
  one. What cannot be the same: [differences.md](differences.md).

## Tools and their formats

verl and TRL let the policy call tools [in the format of its chat template](tool_calls.md). That is
`rollout.protocol=tool_calls` here; the default is tags, as in Search-R1 and SkyRL's search example.

- **verl.** `rollout.multi_turn.format=hermes` is `tool_calls.format=auto`, the format that the template
  writes; `multi_turn.max_parallel_calls` is `tool_calls.max_calls`. `SearchTool` of `tool_config_path` is
  `tools: [search]`, with its `retrieval_service_url` (without `/retrieve`) and `topk` in the section
  `retriever`. A class under `BaseTool` with a `tool_schema` becomes a class under `Action` with
  `parameters` ([your own action](tools.md#your-own-action)), a tool of the type `mcp` an entry
  `{mcp: {url: …}}`.
- **TRL.** `tools=[search]` is `tools: [search]`; a function of your own becomes an action.
  `chat_template_kwargs` is `prompt.chat_template_kwargs`. Training templates, which keep thoughts, are not
  needed: what was sampled stays (`tool_calls.history=keep`).
- **SkyRL.** `environment.env_class=search` with `sampling_params.stop` is the protocol of tags;
  `skyrl_gym.search.search_url` and `topk` are `retriever.url` and `retriever.topk`; `generator.max_turns=4`
  is `rollout.max_searches=3` and the answer. For `generator.use_conversation_multi_turn=true` with tools of
  an environment of your own: `rollout.protocol=tool_calls`, and the tools as actions.

verl's example of a search tool (`search_tool_config.yaml`) becomes:

```yaml
rollout: {protocol: tool_calls, max_searches: 3, on_invalid: retry}
tools: [search]
retriever: {url: "http://127.0.0.1:8000", topk: 3}
```

A TRL function with several arguments becomes an action with a JSON schema:

```python
class Weather(calibadv_jax.Action):
    name, purpose = "weather", "know the weather"
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
        "required": ["city"],
    }

    async def call(self, argument):
        return calibadv_jax.Reply(text=await forecast(**argument))
```
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEADER.format(number=len(peer_keys()))]
    for ours in COMMON:
        cells = []
        for trainers in COLUMNS:
            keys = (key for key in peer_keys() if key.trainer in trainers and ours in key.keys)
            name = ours.rpartition(".")[2]
            names = dict.fromkeys(
                _shortest_end(key, ours) for key in keys if key.name.rpartition(".")[2] != name
            )
            cells.append(", ".join(_cell(name, ours) for name in names))
        parts.append(f"| `{ours}` | {' | '.join(cells)} |\n")
    return "".join([*parts, FOOTER])


def _cell(name: str, ours: str) -> str:
    """Return a peer's name as code, with its trainer where another one of the column means something else."""
    trainer = AMBIGUOUS.get((name, ours))
    return f"`{name}` ({trainer})" if trainer else f"`{name}`"


def _shortest_end(peer_key: PeerKey, ours: str) -> str:
    """Return the shortest end of the peer's name that is answered with our key alone."""
    words = peer_key.name.split(".")
    ends = (".".join(words[start:]) for start in range(len(words) - 1, 0, -1))
    return next(
        (end for end in ends if all(ours in key.keys for key in find_peer_keys(end)[0])), peer_key.name
    )


def main() -> int:
    return write_or_check(PAGE, page(), "scripts.document_peer_keys")


if __name__ == "__main__":
    sys.exit(main())
