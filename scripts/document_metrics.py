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

Every name in `metrics.jsonl`, generated from `calibadv_jax/metrics/catalogue.yaml` by
`python -m scripts.document_metrics`. A row of that file is one step. The cold start writes a file of its own,
`sft_metrics/metrics.jsonl`. A metric over nothing (no search was judged, say) is left out of its row. A value
that is not finite is null, and its name stands under `nonfinite`.

Computed tokens are the trained tokens of the trajectories that can change the loss: with an advantage
somewhere, or of all trajectories if the loss has an entropy bonus or a KL term. The other trajectories
count in the loss as 0, as that is what they add to it. A step in which all
groups tie computes none: it has no loss and no entropy.

`{a,b}` stands for a and for b, `<word>` for any text: a data source may hold slashes. Shares lie in [0, 1].
The last column is the name that the CalibAdv authors give the same value; it is logged too, so that curves
can be laid over theirs.

## Where they go

`log.backends` names the places beside `metrics.jsonl`:

| backend | extra | what it does |
|---|---|---|
| `tensorboard` (default) | none | event files in `tensorboard/`; the extra `tensorboard` is the viewer |
| `wandb` | `wandb` | a run of the project `log.project`; `WANDB_MODE=offline`: for `wandb sync` |
| `mlflow` | `mlflow` | a run of the experiment `log.project`, at `MLFLOW_TRACKING_URI` |
| `prometheus` | in `cpu`, `gpu`, `tpu` | the newest values at `http://<log.prometheus>/metrics` |

A resumed run goes on in the same run of Weights & Biases and MLflow. Steps that are trained again (after a
kill or a rollback) are written again at the same step. An MLflow server that goes away ends no run: what it
missed is sent after a later step.

Prometheus names are `calibadv_` and the metric's name with `_` for every other character:
`calibadv_reward_mean`. The vLLM workers have an endpoint of their own, vLLM's `/metrics` on each worker's
port (requests running and waiting, KV cache use, tokens a second); the retrieval service has `/metrics` too.
For all three:

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
