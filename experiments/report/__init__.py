"""`windtunnel report`: draws a run or a sweep from its files without simulating again."""
