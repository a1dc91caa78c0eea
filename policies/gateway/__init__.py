"""The gateway between clients and replicas, driven by the simulator and by the fleet of real engines."""
