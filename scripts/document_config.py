"""Writes docs/configuration.md from the sections and docstrings of calibadv_jax/config.py.

Run from the repository root:

python -m scripts.document_config            write the page
python -m scripts.document_config --check    exit 1 where the page is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from calibadv_jax import config

SOURCE = Path(config.__file__)
PAGE = SOURCE.parent.parent / "docs" / "configuration.md"
HEADER = """# Configuration

Every key of a config file, generated from `calibadv_jax/config.py` by `python -m scripts.document_config`.
Any of them can be given on the command line: `python -m calibadv_jax.train --config FILE learner.steps=20`.
`${section.key}` stands for another key's value. Unknown keys are refused.
"""


def descriptions() -> dict[tuple[str, str], tuple[str, str]]:
    """(section class, key) -> its type as written and the docstring under it ("" where there is none)."""
    found = {}
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value.value if _is_string(after) else ""
                kind = ast.unparse(node.annotation)
                found[section.name, node.target.id] = (kind, " ".join(text.split()))
    return found


def _is_string(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def page() -> str:
    """The whole page."""
    known = descriptions()
    parts = [HEADER]

    def add(section: Any, prefix: str) -> None:
        leaves, inner = [], []
        for item in dataclasses.fields(section):
            value = getattr(section, item.name)
            kind, text = known[type(section).__name__, item.name]
            if dataclasses.is_dataclass(value):
                inner.append((value, f"{prefix}{item.name}."))
                continue
            shown = json.dumps(value)  # as it is written in YAML
            leaves.append((f"`{prefix}{item.name}`", f"`{kind}`", f"`{shown}`", text))
            element = getattr(config, kind.removeprefix("list[").removesuffix("]"), None)
            if dataclasses.is_dataclass(element):
                inner.append((element(), f"{prefix}{item.name}[]."))
        if leaves:
            parts.append(f"\n## {prefix.rstrip('.')}\n")
            parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
            for leaf in leaves:
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in leaf) + " |\n")
        for value, name in inner:
            add(value, name)

    add(config.Config(), "")
    return "".join(parts)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{PAGE.name} is out of date; run: python -m scripts.document_config\n")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
