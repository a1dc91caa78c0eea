"""From config groups and overrides to a scenario: composing, checking, building."""
