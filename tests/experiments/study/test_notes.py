"""Notes on the runs of several arms are shown once, with the arms that they are about."""

from experiments.study.notes import merged_notes


def test_a_note_of_all_arms_stands_once_and_others_name_their_arms():
    notes = {"a": ["fitted", "truncated"], "b": ["fitted", "assumed", "assumed"], "c": ["fitted", "assumed"]}
    assert merged_notes(notes) == ["fitted", "a: truncated", "b, c: assumed"]


def test_without_notes_there_is_nothing_to_show():
    assert merged_notes({"a": [], "b": []}) == []
