"""Names by user and group: sorted, each once, and gone when the last owner's is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stormd.cache.names import NameIndex

OWNERS = st.tuples(st.sampled_from(["a", "b", "c", "cc", "d"]), st.integers(1, 3))


def group_of(uid: int) -> int:
    return 100 + uid % 2


@given(st.lists(OWNERS, unique=True), st.data())
def test_a_page_is_what_a_search_finds(owners: list[tuple[str, int]], data: st.DataObject) -> None:
    index = NameIndex()
    for name, uid in owners:
        index.add(name, uid, group_of(uid))
    gone = data.draw(st.lists(st.sampled_from(owners), unique=True)) if owners else []
    for name, uid in gone:
        index.remove(name, uid, group_of(uid))
    left = [owner for owner in owners if owner not in gone]
    after = data.draw(st.sampled_from(["", "a", "bb", "z"]))
    for uid in (1, 2, 3):
        gid = group_of(uid)
        readable = {n for n, owner in left if (owner == uid or group_of(owner) == gid)}
        expected = sorted(name for name in readable if name > after)
        assert index.page(uid, gid, after, 9) == (expected, True)
        assert index.page(uid, gid, after, 1) == (expected[:1], len(expected) <= 1)
