"""`windtunnel serve`: an OpenAI-compatible endpoint over a simulated fleet or the real engine."""
