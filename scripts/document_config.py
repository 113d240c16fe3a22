"""Write docs/configuration.md from the JSON schema that pydantic makes of calibadv_jax/config/.

Run from the repository root:

python -m scripts.document_config            write the page
python -m scripts.document_config --check    exit 1 where the page is out of date
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from calibadv_jax.config import Config
from scripts.generated_page import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEADER = """# Configuration

Every key of a config file, generated from `calibadv_jax/config/` by `python -m scripts.document_config`.
Any of them can be given on the command line: `calibadv train --config FILE learner.steps=20`.
Of several files (`--config FILE --config OVERLAY`) the later one wins, key by key. A file with the key
`base: OTHER.yaml` builds upon that one, relative to its own folder.
`${section.key}` stands for another key's value, `${oc.env:NAME}` for that of an environment variable: a run
keeps this reference and not the value. Unknown keys are refused.
Values are YAML. Quote lists and mappings for the shell: `'sampler.urls=[http://a:8100, http://b:8100]'`,
`'data.weights={nq: 1, hotpotqa: 3}'`; `null` is no value.
"""
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A line of the page."""

    section: str  # dotted; "sft.phases[]" for the sections of a list
    name: str
    kind: str
    default: str  # as it is written in YAML
    meaning: str


def keys() -> list[Key]:
    """Return every key that is no section, a section's own keys before its inner sections."""
    schema = TypeAdapter(Config).json_schema()
    definitions = schema["$defs"]

    def section_of(field: dict[str, Any]) -> dict[str, Any] | None:
        """Return the section that a field holds, or may hold."""
        names = [
            option["$ref"].rsplit("/", 1)[-1]
            for option in (field, *field.get("anyOf", ()))
            if "$ref" in option
        ]
        return definitions[names[0]] if names else None

    def defaults_of(section: dict[str, Any]) -> dict[str, Any]:
        return {name: option.get("default") for name, option in section["properties"].items()}

    def walk(section: dict[str, Any], values: dict[str, Any], prefix: str) -> Iterator[Key]:
        inner: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        for name, field in section["properties"].items():
            dotted = f"{prefix}.{name}".lstrip(".")
            element = section_of(field.get("items", {}))
            if (nested := section_of(field)) is not None:
                inner.append((nested, values[name] or defaults_of(nested), dotted))
                continue
            kind = "list of sections" if element else kind_of(field)
            meaning = " ".join(field.get("description", "").split())
            yield Key(prefix, name, kind, as_override(values[name]), meaning)
            if element:
                inner.append((element, defaults_of(element), f"{dotted}[]"))
        for nested, inner_values, dotted in inner:
            yield from walk(nested, inner_values, dotted)

    return list(walk(schema, dataclasses.asdict(Config()), ""))


def as_override(value: Any) -> str:
    """Write a default as an override would: text without quotes, lists and mappings without spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def kind_of(field: dict[str, Any]) -> str:
    """Describe a type: ``integer > 0``, ``adamw or muon``, ``list of text``, ``number or null``."""
    if "anyOf" in field:
        return " or ".join(
            "null" if option["type"] == "null" else kind_of(option) for option in field["anyOf"]
        )
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if field["type"] == "array":
        kind = f"list of {kind_of(field['items'])}"
    elif field["type"] == "object":
        kind = "mapping"
    else:
        kind = TYPES[field["type"]]
    limits = [f"{sign} {field[limit]:g}" for limit, sign in LIMITS.items() if limit in field]
    return " ".join([kind, ", ".join(limits)]).rstrip()


def page() -> str:
    """Return the whole page; a section with the keys and texts of an earlier one only names its defaults."""
    parts = [HEADER]
    described: dict[tuple[tuple[str, str, str], ...], str] = {}  # keys of a section -> its name
    for section, members in itertools.groupby(keys(), lambda key: key.section):
        rows = [(f"`{section}.{key.name}={key.default}`".replace("`.", "`"), key) for key in members]
        texts = tuple((key.name, key.kind, key.meaning) for _, key in rows)
        parts.append(f"\n## {section or 'no section'}\n")
        if (other := described.setdefault(texts, section)) != section:
            parts.append(f"As [{other}](#{other.replace('.', '')}): {', '.join(name for name, _ in rows)}.\n")
            continue
        parts.append("| key=default | value | meaning |\n|---|---|---|\n")
        for name, key in rows:
            cells = (name, key.kind, key.meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def main() -> int:
    return write_or_check(PAGE, page(), "scripts.document_config")


if __name__ == "__main__":
    sys.exit(main())
