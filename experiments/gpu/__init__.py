"""The parts of `python -m experiments.gpu_run`: everything that is measured on a GPU."""
