"""`windtunnel sweep`: runs every combination of several values of settings in workers that stay alive."""
