"""What all other packages share: types, errors, the tag grammar, files, random seeds."""
