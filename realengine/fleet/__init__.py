"""A fleet of engines: one process per engine, behind the gateway of `policies.gateway`."""
