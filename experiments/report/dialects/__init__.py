"""`windtunnel dialects`: a finished run by other tools' definitions."""
