"""Documentation site: its pages, the generated reference, and checks of the built HTML. `make docs`."""
