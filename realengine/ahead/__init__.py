"""What every launch of the engine takes on chips that are not there: `python -m realengine.ahead`."""
