"""`windtunnel capacity`: the cheapest fleet that keeps an SLO."""
