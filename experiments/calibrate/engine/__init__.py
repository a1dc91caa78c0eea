"""`windtunnel calibrate device=...`: measures this machine for windtunnel's own engine."""
