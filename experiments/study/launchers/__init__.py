"""Where many runs are flown: in processes of this machine, on a Ray cluster, or as jobs of a batch system.

A launcher is a dataclass with `outcomes(work, tasks, interrupt)`, named by a choice of the config group
`launcher`. What a task raises, and a worker that is killed, is that task's outcome; the others go on.
"""
