"""Who leaves for one more: the oldest, of the user who has the most."""

from __future__ import annotations

from stormd.transport.sessionless import Sessionless


def test_each_user_has_so_many() -> None:
    places: Sessionless[str] = Sessionless(10, max_of_user=2)
    assert places.add("a", 1) is None
    assert places.add("b", 2) is None
    assert places.add("c", 2) is None
    assert places.add("d", 2) == "b"
    places.remove("b")
    assert places.all == ["a", "c", "d"]
    assert "b" not in places.all


def test_all_have_so_many_and_who_has_the_most_gives_way() -> None:
    places: Sessionless[str] = Sessionless(3, max_of_user=3)
    for name, uid in (("modest", 1), ("first", 2), ("second", 2)):
        assert places.add(name, uid) is None
    assert places.add("late", 3) == "first"
    places.remove("first")
    assert len(places.all) == 3


def test_nobody_is_the_oldest_of_none() -> None:
    places: Sessionless[str] = Sessionless(1, max_of_user=1)
    assert places.oldest() is None
    places.remove("never there")
    assert places.add("one", 1) is None
    assert places.oldest() == "one"
