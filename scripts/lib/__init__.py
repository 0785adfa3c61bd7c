"""The nouns that the verbs of `scripts` work with: archives, properties, servers, loads."""
