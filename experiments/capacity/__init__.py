"""`windtunnel capacity`: finds the cheapest fleet that meets an SLO."""
