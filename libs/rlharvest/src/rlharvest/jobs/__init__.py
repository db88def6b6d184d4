"""Jobs: what a user asks for (model), the names other tools use for it (aliases), and its life (state)."""
