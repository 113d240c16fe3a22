"""Optional parts: the core never imports them. Commands and registries load them by name."""
