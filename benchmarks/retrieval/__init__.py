"""How fast and how exactly the retrieval service answers."""
