"""One replica in simulated time, its clock and its signals."""
