"""The serving loop of one model instance: EngineCore, its sequences, views, steps and plans."""
