"""How fast a policy is updated."""
