"""The commands that a person starts, a folder a command."""
