"""Where KV lives. One policy a file."""
