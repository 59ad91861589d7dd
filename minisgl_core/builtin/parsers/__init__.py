"""The forms in which known families of models write their reasoning and their tool calls."""
