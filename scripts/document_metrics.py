"""Write docs/metrics.md from calibadv_jax/metrics/catalogue.yaml.

Run from the repository root:

python -m scripts.document_metrics            write the page
python -m scripts.document_metrics --check    exit 1 where the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibadv_jax.metrics.catalogue import Metric, authors_names, sections
from scripts.generated_page import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEADER = """# Metrics

For everyone who reads metrics. Every name in `metrics.jsonl` (a row is one step;
`sft_metrics/metrics.jsonl` for the cold start), generated from `calibadv_jax/metrics/catalogue.yaml` by
`python -m scripts.document_metrics`. A metric over nothing is omitted. A value that is not finite is null,
and its name stands under `nonfinite`.

Computed tokens are the trained tokens of trajectories that can change the loss: those with an advantage, or
all with an entropy bonus or a KL term. A step in which all groups tie computes none: it has no loss and no
entropy.

`{a,b}` stands for a and for b, `<word>` for any text. Shares lie in [0, 1]. Values are also logged under
the name that CalibAdv's authors give them.

## Where they go

`log.backends` names the places beside `metrics.jsonl`:

| backend | extra | what it does |
|---|---|---|
| `tensorboard` (default) | none | event files in `tensorboard/`; the extra `tensorboard` is the viewer |
| `wandb` | `wandb` | a run of the project `log.project`; `WANDB_MODE=offline`: for `wandb sync` |
| `mlflow` | `mlflow` | a run of the experiment `log.project`, at `MLFLOW_TRACKING_URI` |
| `prometheus` | in `cpu`, `gpu`, `tpu` | the newest values at `http://<log.prometheus>/metrics` |

A resumed run continues the same run of Weights & Biases and MLflow; repeated steps are written again. An
MLflow server that goes away ends no run: it gets the missed rows later.

What Weights & Biases and MLflow show of a run:

- **Name**: the last two folders of `run.dir`, such as `quickstart-grpo/seed-0`; a cold start has "cold start"
  behind it. Group: the folder that holds the seeds.
- **Config**: every key, without secrets. MLflow's parameters are fixed: a value that a later start changed is
  the tag `changed/KEY`.
- **Table `trajectories`**, every `log.tables_every` steps: question, answer, score, queries, advantage of
  each turn, transcript; whole groups, at most 64 rows. In MLflow it is `trajectories/step_N.json`.

Prometheus names are `calibadv_` and the name with `_` for other characters: `calibadv_reward_mean`. vLLM
workers and the retrieval service have `/metrics` on their ports too:

```yaml
scrape_configs:
  - job_name: calibadv
    static_configs:
      - targets: ["127.0.0.1:9464"]                       # trainer: log.prometheus
      - targets: ["10.0.0.2:8100", "10.0.0.3:8100"]       # vLLM workers: sampler.urls
      - targets: ["127.0.0.1:8000"]                       # retrieval service: retriever.url
```
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEADER]
    for section, metrics in sections().items():
        parts.append(f"\n## {section}\n\n| name | unit | meaning | the authors' name |\n|---|---|---|---|\n")
        parts += ["| " + " | ".join(cells(metric)) + " |\n" for metric in metrics]
    return "".join(parts)


def cells(metric: Metric) -> list[str]:
    """Return the cells of a metric's line."""
    aliases = [alias for name in metric.names() for alias in authors_names(name)]
    cells = [f"`{metric.name}`", metric.unit, metric.meaning, ", ".join(f"`{alias}`" for alias in aliases)]
    return [cell.replace("|", "\\|") for cell in cells]


def main() -> int:
    return write_or_check(PAGE, page(), "scripts.document_metrics")


if __name__ == "__main__":
    sys.exit(main())
