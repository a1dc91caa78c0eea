"""`windtunnel goodput`: the highest request rate that keeps an SLO."""
