"""Writes docs/coming_from.md from the table of calibadv_jax/config/peer_keys.py.

Run from the repository root:

python -m scripts.document_peer_keys            write the page
python -m scripts.document_peer_keys --check    exit 1 where the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibadv_jax.config import peer_keys
from scripts.generated_page import write_or_check

PAGE = Path(__file__).resolve().parent.parent / peer_keys.PAGE
HEADER = """# Coming from Search-R1, verl, RLinf, TRL or Tunix

For people who have a config of another trainer: which key stands here for theirs. An unknown key is answered
with the same table, also by the end of its name: `n_agent=5` as `actor_rollout_ref.rollout.n_agent=5`.
Generated from `calibadv_jax/config/peer_keys.py` by `python -m scripts.document_peer_keys`; all keys of this
project are in [configuration.md](configuration.md). Search-R1 and the authors' code of CalibAdv are forks of
verl: what they share with it stands under verl.
"""


def page() -> str:
    """The whole page."""
    parts = [HEADER]
    for trainer in peer_keys.PEER_KEYS:
        parts.append(f"\n## {trainer}\n\n| {trainer} | here | note |\n|---|---|---|\n")
        rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for key in peer_keys.ALL:
            if key.trainer == trainer:
                rows.setdefault((key.keys, key.note), []).append(key.name)
        for (keys, note), names in rows.items():
            left, right = (", ".join(f"`{name}`" for name in column) for column in (names, keys))
            parts.append(f"| {left} | {right or 'none'} | {note} |\n")
    return "".join(parts)


def main() -> int:
    return write_or_check(PAGE, page(), "scripts.document_peer_keys")


if __name__ == "__main__":
    sys.exit(main())
