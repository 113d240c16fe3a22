"""The credit of a run compared with the truth: evidence of kept steps, measures, tables and verdict."""
