"""Implementations of attention that compute long chunks of prompts instead of the backend's kernel."""
