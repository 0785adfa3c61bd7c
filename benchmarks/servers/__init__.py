"""The peers as a person would serve MiniLM with them. Each runs in its own environment and imports nothing of ours."""
