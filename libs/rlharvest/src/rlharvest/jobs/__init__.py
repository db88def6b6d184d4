"""Jobs: what a user asks for (model, made of blocks), the names other tools use for it (aliases), and its life (state)."""
