"""`windtunnel validate`: how far the simulator is from a real engine."""
