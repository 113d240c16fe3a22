"""Replacements of plain formulas, with the same values but for rounding."""
