"""What an iteration of a replica is, and what its price is made of: layout, memory, operators, pipelines."""
