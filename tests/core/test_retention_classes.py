"""A run may belong to several retention classes, of which one decides how long it is kept."""

from math import inf

from app.core.run.retention_classes import (
    RetentionClass,
    RunClass,
    Selection,
    content_selections,
    event_selections,
)

BANK, PHI = RunClass(tenant="bank"), RunClass(label="phi")


def test_texts_are_kept_for_the_shortest_time_that_a_class_says() -> None:
    classes = [RetentionClass(BANK, content=100.0), RetentionClass(PHI, content=7.0, events=5.0)]
    assert content_selections(30.0, classes) == [
        Selection(100.0, BANK),
        Selection(7.0, PHI),
        Selection(30.0, without=(BANK, PHI)),
    ]
    assert content_selections(None, [RetentionClass(BANK, content=inf)]) == []
    assert content_selections(30.0, []) == [Selection(30.0)]


def test_runs_are_kept_for_the_longest_time_that_a_class_says() -> None:
    classes = [RetentionClass(BANK, events=100.0), RetentionClass(PHI, content=1.0, events=7.0)]
    assert event_selections(30.0, classes) == [
        Selection(100.0, BANK),
        Selection(7.0, PHI, (BANK,)),
        Selection(30.0, without=(BANK, PHI)),
    ]
    forever = [RetentionClass(BANK, events=inf), RetentionClass(PHI, events=7.0)]
    assert event_selections(None, forever) == [Selection(7.0, PHI, (BANK,))]
