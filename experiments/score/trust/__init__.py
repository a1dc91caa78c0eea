"""`windtunnel score --update-trust`: expected errors by leaving out one group of rows at a time."""
