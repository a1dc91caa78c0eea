"""Turns settings into objects: scenarios, deployments and pools."""
