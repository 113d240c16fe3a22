"""Tool-call protocols: formats of calls, and what the environment writes in a chat template."""
