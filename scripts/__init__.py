"""The command line of batchserve: one module per verb here, the nouns in `scripts.lib`."""
