"""`windtunnel validate`: compares the simulator with a real engine."""
