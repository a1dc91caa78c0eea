"""`windtunnel dashboard`: a local web page that answers while settings are turned."""
