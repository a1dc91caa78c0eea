"""The traffic of a run: arrivals, lengths, conversations, recorded traces."""
