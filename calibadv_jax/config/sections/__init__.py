"""The sections of a config: one module each."""
