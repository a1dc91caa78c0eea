"""Expected errors of simulated figures, and where they were measured."""
