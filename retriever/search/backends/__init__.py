"""What can search: one module for each kind of index."""
