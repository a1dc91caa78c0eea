"""The parts of `python -m experiments.gpu_run`: all checks and measurements on a GPU."""
