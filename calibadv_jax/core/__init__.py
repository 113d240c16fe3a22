"""Types, errors, the tag grammar, files and random seeds: shared by all other packages."""
