"""`windtunnel goodput`: finds the highest request rate that meets an SLO."""
