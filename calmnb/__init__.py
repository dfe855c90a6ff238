"""calmnb: run a language model at the limit of its memory, and see where each token's time and bytes go."""
