"""The real engine as the back end of `windtunnel serve`."""
