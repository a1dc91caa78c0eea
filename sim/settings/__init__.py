"""Composes and checks configs and builds scenarios from them."""
