"""Drafts from history against the same engine without them, in a second epoch with a policy that training moved."""
