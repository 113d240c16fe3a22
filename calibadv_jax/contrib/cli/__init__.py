"""Optional commands: studies, checks and pages. One module per command."""
