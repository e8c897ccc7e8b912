"""The persistent containers against dict and list, all versions kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from infer.persistent import Fifo, ShardedMap

KEYS = st.integers(0, 30).map(lambda i: f"k{i}")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.lists(st.tuples(KEYS, st.booleans())))))
def test_map_versions_never_change(edits: list[tuple[int, list[tuple[str, bool]]]]) -> None:
    """Each edit starts from any earlier version, the newest or not."""
    versions: list[tuple[ShardedMap[str, int], dict[str, int]]] = [(ShardedMap(), {})]
    for number, (pick, changes) in enumerate(edits):
        current, expected = versions[pick % len(versions)]
        edit, expected = current.edit(), dict(expected)
        for key, add in changes:
            if add:
                edit.set(key, number)
                expected[key] = number
            elif key in expected:
                edit.remove(key)
                del expected[key]
            assert edit.get(key) == expected.get(key)
        versions.append((edit.freeze(), expected))
    for version, expected in versions:
        assert len(version) == len(expected)
        assert dict(version.items()) == expected
        for i in range(31):
            assert version.get(f"k{i}") == expected.get(f"k{i}")
            assert (f"k{i}" in version) == (f"k{i}" in expected)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 100),
            st.one_of(st.integers(0, 200), st.lists(st.integers(), min_size=1, max_size=50)),
        )
    )
)
def test_queue_versions_never_change(edits: list[tuple[int, int | list[int]]]) -> None:
    """Each edit (append items, or drop a number of them) starts from any earlier version."""
    versions: list[tuple[Fifo[int], list[int]]] = [(Fifo(), [])]
    for pick, what in edits:
        current, expected = versions[pick % len(versions)]
        if isinstance(what, list):
            versions.append((current.extend(what), expected + what))
        else:
            count = min(what, len(expected))
            versions.append((current.drop(count), expected[count:]))
    for version, expected in versions:
        assert list(version) == expected
        assert len(version) == len(expected)


def test_a_queue_gives_memory_back() -> None:
    queue: Fifo[int] = Fifo()
    for i in range(100_000):
        queue = queue.append(i)
        if i >= 100:
            queue = queue.drop(1)
    assert list(queue) == list(range(99_900, 100_000))
    assert len(queue.log) < 400
