"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its
own input, so that a public clone notices the same faults.
"""

from __future__ import annotations

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


# ---- lora: adapters of PEFT and verl ----


# ---- rows: layouts of question files ----


# ---- retriever: queries without a hit, indexes with their own ids ----


# ---- metrics: names with a slash ----


# ---- versions: bounds of dependencies ----
