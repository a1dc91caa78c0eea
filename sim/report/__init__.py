"""Writes the files of a run: tables, report.html with its plots, and the timeline for Perfetto."""
