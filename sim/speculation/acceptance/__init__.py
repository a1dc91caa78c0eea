"""Acceptance models: how many draft tokens of a pass the target model accepts. One model per file."""
