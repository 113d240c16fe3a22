"""config.json of the paper's three models, as their authors publish them."""

import json
from pathlib import Path

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
