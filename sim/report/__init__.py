"""Writes what a run leaves: tables, report.html, its figures, and the timeline for Perfetto."""
