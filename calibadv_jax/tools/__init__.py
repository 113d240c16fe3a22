"""Commands without a config: one module each, with add_arguments(parser) and run(arguments)."""
