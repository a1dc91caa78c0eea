"""Where the runs of a study are: processes of this machine, a Ray cluster, jobs of a batch system."""
