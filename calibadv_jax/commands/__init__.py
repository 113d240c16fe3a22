"""Commands with a config: one module each, whose run(config) does the work."""
