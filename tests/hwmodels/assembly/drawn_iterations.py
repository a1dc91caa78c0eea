"""Iterations that are drawn: sizes of batches, contexts and chunks."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hwmodels.host import HostOverhead

NO_HOST = HostOverhead(iteration_s=0, sequence_s=0, launch_s=0, graph_replay_s=0)

chunks = st.lists(st.tuples(st.integers(1, 800), st.integers(0, 8192)), max_size=3)
"""(new, cached) tokens of each prompt chunk."""
contexts = st.lists(st.integers(1, 8192), max_size=40) | st.lists(
    st.integers(1, 50), min_size=250, max_size=300
)
"""Context of each decode."""
drawn_shapes = st.tuples(contexts, chunks, st.booleans()).filter(lambda drawn: drawn[0] or drawn[1])

few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Examples for each of the kinds of models and layouts."""
