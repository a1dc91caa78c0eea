"""Recordings of live sessions: what is logged comes back, and a file that no server writes is refused."""

import pandas as pd
import pyarrow.parquet as pq
import pytest

from policies.adapters.serving import Adapter
from policies.core.request import Prompt, Request, Segment
from sim.report.files import write_table
from sim.settings.errors import ConfigError
from sim.workload import recording
from sim.workload.base import Arrival
from sim.workload.chunks import chunks_of
from sim.workload.modified import faster
from sim.workload.recording import FILE, Recording, TrafficLog
from tests.sim.workload.reading_memory import peak_mib_of

PROMPT = Prompt(40, (Segment(7, 16), Segment(1 << 60, 16), Segment(3, 8)))
ARRIVALS = [
    Arrival(Request(1, 0.5, PROMPT, max_tokens=9), 4, time_s=0.75),
    Arrival(Request(0, 1.0, Prompt(5), tenant="a", priority=-3, deadline_s=7.0), 9, time_s=1.0),
    Arrival(Request(2, 1.0, PROMPT, answer_id=2, adapter="sql", model="m"), 8, time_s=2.0, gives_up_s=2.5),
]


@pytest.fixture
def recorded(tmp_path):
    """Returns a function that writes a recording of ARRIVALS, changed, and returns its folder."""

    def write(**changes):
        log = TrafficLog()
        for arrival in reversed(ARRIVALS):
            log.add(arrival.request, arrival.num_output_tokens, arrival.time_s)
            if arrival.gives_up_s is not None:
                log.abort(arrival.request.request_id, arrival.gives_up_s)
        log.remark("a cold start")
        write_table(log.table({"sql": 8}).assign(**changes), tmp_path / FILE)
        return tmp_path

    return write


def test_requests_come_back_in_the_order_of_their_arrival(recorded):
    recording = Recording(path=recorded())
    source = recording.source(seed=0, max_model_len=100)
    assert list(source.arrivals()) == ARRIVALS
    assert recording.adapters == (Adapter(name="sql", rank=8),)
    assert recording.models == {"m": 1.0}
    assert source.notes.remarks == ["The session had a cold start (1), which this run does not repeat."]
    assert source.num_requests == 3


@pytest.fixture
def in_parts(monkeypatch):
    """Reads two rows at a time."""
    monkeypatch.setattr(recording, "ROWS", 2)


@pytest.mark.usefixtures("in_parts")
def test_requests_come_back_from_parts_of_a_file_as_often_as_they_are_needed(recorded):
    source = Recording(path=recorded()).source(seed=0, max_model_len=30)
    assert [arrival.at_s for arrival in source.arrivals()] == [0.75, 1.0, 2.0]
    for _ in range(2):
        assert [a for chunk in chunks_of(source) for a in chunk.arrivals()] == list(source.arrivals())
    assert (source.num_requests, source.last_arrival_s, source.notes.num_clipped) == (3, 2.0, 2)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": [4, 7, 4]}, "row 2: request_id=4 is not what a server writes"),
        ({"time_s": [1.0, 5.0, 4.0]}, "row 2: time_s=4.0"),
        ({"prompt_tokens": [-1, 50, None]}, "prompt_tokens must be whole numbers, found float64"),
        ({"time_s": [1.0, 0.5, 4.0], "request_id": [4, 7, 4]}, "row 2: request_id=4"),
        ({"time_s": [1.0, 0.5, 4.0], "output_tokens": [1, 1, 0]}, "row 2: output_tokens=0"),
        ({"arrival_s": [-1, 0, 0], "content_tokens": [[1], [2], [3]]}, "row 0: arrival_s=-1 is"),
    ],
)
def test_of_several_mistakes_the_first_column_that_has_one_is_named(recorded, changes, message):
    """As if each column were read whole, whichever part of the file a mistake is in."""
    folder = recorded(**changes)
    with pytest.raises(ValueError, match=message):
        Recording(path=folder)


@pytest.mark.usefixtures("in_parts")
def test_a_recording_that_changes_after_its_check_ends_the_run_with_a_sentence(recorded):
    source = Recording(path=recorded()).source(seed=0, max_model_len=100)
    arrivals = source.arrivals()
    next(arrivals)
    recorded(tenant="another")
    for requests in (arrivals, source.arrivals()):
        with pytest.raises(ConfigError, match=r"recording.parquet: has changed since it was checked; start"):
            list(requests)


@pytest.mark.parametrize("remarks", [5, {"a cold start": "often"}, [1]])
def test_remarks_that_no_server_writes_are_refused(recorded, remarks):
    folder = recorded()
    table = pd.read_parquet(folder / FILE)
    table.attrs = {"windtunnel_remarks": remarks}
    write_table(table, folder / FILE)
    with pytest.raises(ValueError, match="has remarks that are not what a server writes"):
        Recording(path=folder)


IMPORTS = "from sim.workload.recording import Recording"
READ = "Recording(path=sys.argv[1]).source(seed=0, max_model_len=4096).arrivals()"


@pytest.mark.slow
def test_the_memory_of_a_recording_does_not_grow_with_its_rows(recorded, tmp_path):
    """Peak resident memory above that of the start, in processes of their own; 8 bytes per row are ids."""
    rows = pq.read_table(recorded() / FILE).to_pandas().iloc[[0]]

    def peak_mib(num_rows):
        table = pd.concat([rows] * num_rows, ignore_index=True).assign(request_id=range(num_rows))
        table.to_parquet(tmp_path / FILE)
        return peak_mib_of(IMPORTS, READ, tmp_path / FILE)

    assert peak_mib(200_000) < peak_mib(50_000) + 16


def test_clients_may_stay(recorded):
    source = Recording(path=recorded() / FILE, aborts=False).source(seed=0, max_model_len=100)
    assert all(arrival.gives_up_s is None for arrival in source.arrivals())


def test_prompts_are_clipped_to_the_context_and_keep_their_beginning(recorded):
    source = Recording(path=recorded()).source(seed=0, max_model_len=30)
    request = next(source.arrivals()).request
    assert request.prompt == Prompt(26, (Segment(7, 16), Segment(1 << 60, 10)))
    assert request.max_tokens == 4
    assert source.notes.num_clipped == 2


def test_at_twice_the_load_clients_are_as_patient_as_before(recorded):
    source = faster(Recording(path=recorded()).source(seed=0, max_model_len=100), 2.0)
    *_, last = source.arrivals()
    assert (last.at_s, last.gives_up_s) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "row 0: prompt_tokens=0"),
        ({"prompt_tokens": 1.5}, "prompt_tokens must be whole numbers"),
        ({"time_s": [3.0, 2.0, 1.0]}, "row 1: time_s=2.0"),
        ({"arrival_s": -1.0}, "row 0: arrival_s=-1.0"),
        ({"arrival_s": float("nan")}, "row 0: arrival_s=nan"),
        ({"aborted_s": "soon"}, "aborted_s must be numbers"),
        ({"request_id": 1}, "row 1: request_id=1"),
        ({"tenant": 5}, "row 0: tenant=5"),
        ({"adapter_rank": 0}, "row 2: adapter_rank=0"),
        ({"content_tokens": [[1], [2], [3]]}, "row 0: contents"),
        ({"contents": "text"}, "row 0: contents"),
        ({"output_tokens": 1 << 40}, "row 0: output_tokens"),
    ],
)
def test_a_file_that_no_server_writes_is_refused(recorded, changes, message):
    folder = recorded(**changes)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        Recording(path=folder)


def test_a_folder_or_file_without_a_recording_is_refused(recorded, tmp_path):
    with pytest.raises(ValueError, match=r"has no recording\.parquet"):
        Recording(path=tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="is not a whole parquet file"):
        Recording(path=tmp_path)
    write_table(pd.DataFrame({"request_id": [1]}), tmp_path / FILE)
    with pytest.raises(ValueError, match="has no column prompt_tokens"):
        Recording(path=tmp_path)
