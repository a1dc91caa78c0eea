"""A listener of a replica receives the events it implements, in the order of joining, and no others."""

from sim.engine.attachment import Attachment, Listeners


class Two(Attachment):
    def __init__(self, calls):
        self.calls = calls

    def sent(self, request):
        self.calls.append(("sent", request))

    def crashed(self, now):
        self.calls.append(("crashed", now))


def test_only_what_an_attachment_overrides_is_called():
    listeners, calls = Listeners(), []
    listeners.add(Attachment())
    assert not any(vars(listeners).values())
    listeners.add(Two(calls))
    assert {event for event, called in vars(listeners).items() if called} == {"sent", "crashed"}
    for tell in listeners.sent:
        tell("request")
    assert calls == [("sent", "request")]


def test_every_event_of_an_attachment_has_listeners():
    events = {name for name in vars(Attachment) if not name.startswith("_")}
    assert events == set(vars(Listeners()))


def test_attachments_are_called_in_the_order_of_joining():
    listeners, calls = Listeners(), []
    for name in ("first", "second"):

        class Joining(Attachment):
            def crashed(self, now, name=name):
                calls.append(name)

        listeners.add(Joining())
    for tell in listeners.crashed:
        tell(1.0)
    assert calls == ["first", "second"]
