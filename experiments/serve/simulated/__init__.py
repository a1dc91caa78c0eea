"""The simulated fleet as a back end of the server."""
