"""Replacements of plain formulas, with the same values up to rounding."""
