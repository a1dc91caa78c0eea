"""`windtunnel dashboard`: a local web page that simulates again whenever a setting is changed."""
