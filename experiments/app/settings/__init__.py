"""Settings as users give them: config folders and overrides, composed by Hydra to plain mappings."""
