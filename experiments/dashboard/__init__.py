"""`windtunnel dashboard`: a local web page that answers while settings are turned.

Dash: its makers are plotly's, whose figures the reports have already; callbacks are plain functions that
tests call; it needs no network and is the lightest of its kind (157 MB installed, others 450 MB and more).
"""
