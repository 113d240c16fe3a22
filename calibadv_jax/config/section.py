"""What all sections have in common."""

from __future__ import annotations

from pydantic import ConfigDict

# Unknown keys, nan and inf are refused; the text under a field is its description (docs/configuration.md).
SECTION = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
