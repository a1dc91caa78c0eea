"""`windtunnel calibrate`: fits the hardware model of a device to measured operators."""
