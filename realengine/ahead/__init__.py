"""Resources of every launch of the engine on chips that are not available: `python -m realengine.ahead`."""
