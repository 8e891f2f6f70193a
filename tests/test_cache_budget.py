"""What is removed from the cache: what was not used for longest, and never what somebody uses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from caches import FILES, NBYTES, cache_at, contents, found, leftovers, make, never, wanted
from forked import in_process
from reliability.processes import child, wait_for
from reliability.tracing import Shared

from tdgpu.cache import budget, locks
from tdgpu.cache.directory import find, obtain
from tdgpu.errors import InvalidArgument, InvalidArgumentType
from tdgpu.options import get, options

DAY = 86400


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with cache_at(tmp_path / "cache") as root:
        yield root


def fill(root: Path, count: int) -> None:
    """Results that nobody uses; number 0 was used last, and each other a day before the one before it."""
    for number in range(count):
        path = obtain(wanted(number), make).path
        when = time.time() - number * DAY
        os.utime(path.parent / "used", (when, when))


def there(root: Path) -> list[int]:
    return sorted(int(one.digest, 16) for one in budget.stored(root))


def test_what_there_is_comes_with_sizes_and_the_last_used_first(root):
    assert budget.stored(root) == []
    fill(root, 3)
    there_is = budget.stored(root)
    assert [int(one.digest, 16) for one in there_is] == [0, 1, 2]
    assert {one.nbytes for one in there_is} == {NBYTES}
    assert there_is[2].used == pytest.approx(time.time() - 2 * DAY, abs=60)


def test_a_lookup_is_a_use(root):
    fill(root, 3)
    obtain(wanted(2), never)
    assert int(budget.stored(root)[0].digest, 16) == 2


def test_what_was_just_built_was_just_used_however_long_that_took(root):
    def build(path: Path) -> None:
        make(path)
        os.utime(path.parent / "used", (1, 1))

    obtain(wanted(), build)
    assert budget.stored(root)[0].used == pytest.approx(time.time(), abs=60)


def test_after_a_build_those_go_that_were_not_used_for_longest(root):
    fill(root, 4)
    with options(cache_max_bytes=3 * NBYTES):
        obtain(wanted(9), make)
    assert there(root) == [0, 1, 9]
    assert leftovers(root) == []


def test_nothing_goes_while_there_is_room_or_no_limit(root):
    fill(root, 3)
    with options(cache_max_bytes=4 * NBYTES):
        obtain(wanted(9), make)
    obtain(wanted(10), make)
    assert there(root) == [0, 1, 2, 9, 10]


def test_what_is_in_use_stays_even_if_it_is_too_much_and_so_does_what_was_just_built(root):
    fill(root, 3)
    used = found(2)
    with options(cache_max_bytes=0):
        built = obtain(wanted(9), make)
    assert there(root) == [2, 9]
    assert contents(used.path) == contents(built.path) == FILES
    del used, built
    with options(cache_max_bytes=0):
        obtain(wanted(10), make)
    assert there(root) == [10]


def test_what_was_replaced_goes_first_and_whatever_the_limit(root):
    fill(root, 2)
    for limit in (3 * NBYTES, None):
        replaced = [obtain(wanted(9), make)]
        obtain(wanted(9), make, rebuild=True)
        replaced.clear()
        assert there(root) == [0, 1, 9, 9]
        budget.keep_within(root, limit)
        assert there(root) == [0, 1, 9]


def test_what_another_process_uses_stays_until_it_ends_however_it_ends(root):
    fill(root, 2)
    using = Shared()

    def use() -> None:
        entry = found(1)
        using.value = 1
        time.sleep(60)
        del entry

    with child(use) as pid:
        wait_for(using, 1)
        budget.keep_within(root, 0)
        assert there(root) == [1]
        os.kill(pid, signal.SIGKILL)
    budget.keep_within(root, 0)
    assert there(root) == []


def test_a_forked_child_and_its_parent_each_use_what_both_have(root):
    fill(root, 1)
    entries = [found(0)]
    forked, release, let_go = Shared(), Shared(), Shared()

    def use() -> None:
        forked.value = 1
        wait_for(release, 1)
        entries.clear()
        let_go.value = 1
        wait_for(release, 2)

    with child(use):
        wait_for(forked, 1)
        entries.clear()
        budget.keep_within(root, 0)
        assert there(root) == [0], "the child uses it"
        release.value = 1
        wait_for(let_go, 1)
        budget.keep_within(root, 0)
        assert there(root) == [], "nobody uses it, though the child lives"
        release.value = 2


def test_the_end_of_a_forked_child_does_not_end_the_parents_use(root):
    fill(root, 1)
    entry = found(0)
    with child(lambda: None):
        pass
    budget.keep_within(root, 0)
    assert there(root) == [0]
    assert contents(entry.path) == FILES


def test_a_program_that_is_started_does_not_use_what_its_parent_had(root):
    fill(root, 1)
    entry = found(0)
    reader, writer = os.pipe()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "echo; sleep 60"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)])  # fmt: skip  # noqa: E501
    try:
        os.read(reader, 1)
        del entry
        budget.keep_within(root, 0)
        assert there(root) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_two_that_remove_at_once_remove_no_more_than_one_would(root):
    fill(root, 6)
    begin = Shared()

    def rename_slowly(old: Path, new: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
        time.sleep(0.02)
        rename(old, new)

    def collect() -> None:
        os.rename = rename_slowly  # type: ignore[assignment]  # in a process of its own
        wait_for(begin, 1)
        budget.keep_within(root, 3 * NBYTES)

    with child(collect), child(collect), child(collect):
        begin.value = 1
    assert there(root) == [0, 1, 2]


def test_a_lookup_is_not_disturbed_by_those_who_look_what_is_in_use(root):
    fill(root, 1)
    stop = Shared()

    def look() -> None:
        while not stop.value:
            for one in budget.stored(root):
                budget.in_use(one.directory)

    with child(look), child(look):
        for _ in range(50):
            assert find(wanted(0).digest) is not None
        stop.value = 1


def test_lookups_while_it_is_removed_and_built_give_all_of_it(root):
    stop = Shared()

    def churn() -> None:
        while not stop.value:
            budget.keep_within(root, 0)

    obtain(wanted(0), make)
    with child(churn):
        for _ in range(25):
            assert contents(obtain(wanted(0), make).path) == FILES
        stop.value = 1
    budget.keep_within(root, 0)
    assert there(root) == []
    assert leftovers(root) == []
    assert os.listdir(root / "entries") == []


def test_a_removal_that_is_killed_at_any_moment_leaves_the_result_or_nothing(tmp_path):
    code = """
    import sys
    from pathlib import Path
    from caches import cache_at, make, obtain, sweep_kills, wanted
    from tdgpu.cache import budget
    def prepare(root):
        with cache_at(root):
            obtain(wanted(), make)
    print(sweep_kills(Path(sys.argv[1]), lambda root: budget.keep_within(root, 0), prepare, 12))
    """
    assert 0 < int(in_process(code, tmp_path)) < 12


def test_what_a_killed_builder_has_left_is_removed_and_what_a_living_one_builds_is_not(root):
    building, release = Shared(), Shared()

    def build(path: Path) -> None:
        make(path)
        building.value += 1
        wait_for(release, 1)

    with child(lambda: obtain(wanted(0), build)) as killed, child(lambda: obtain(wanted(1), build)):
        wait_for(building, 2)
        assert budget.sweep(budget.leftovers(root)) == []
        os.kill(killed, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
        assert [path.name[:16] for path in budget.sweep(budget.leftovers(root))] == [wanted(0).digest]
        release.value = 1
    assert contents(obtain(wanted(1), never).path) == FILES


def test_lock_files_go_with_their_results_unless_somebody_builds(root):
    fill(root, 2)
    building, release = Shared(), Shared()

    def build(path: Path) -> None:
        building.value = 1
        wait_for(release, 1)
        make(path)

    with child(lambda: obtain(wanted(2), build)):
        wait_for(building, 1)
        budget.keep_within(root, NBYTES)
        budget.forget_locks(root)
        names = {name for name in os.listdir(root / "locks") if not name.startswith(".")}
        assert names == {f"{wanted(number).digest}.lock" for number in (0, 2)}
        release.value = 1


@pytest.mark.filterwarnings("ignore::tdgpu.cache.locks.CacheWarning")
def test_without_locks_nothing_is_removed(root, monkeypatch):
    fill(root, 2)
    (root / "building" / "0123.4.5").mkdir()

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert budget.keep_within(root, 0) == []
    assert budget.sweep(budget.leftovers(root)) == []
    assert all(budget.in_use(one.directory) for one in budget.stored(root))
    assert there(root) == [0, 1]


def test_the_limit_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("TDGPU_CACHE_MAX_BYTES", "10G")
    assert get().cache_max_bytes == 10 << 30
    with options(cache_max_bytes=None) as now:
        assert now.cache_max_bytes is None
    for wrong, error in ((-1, InvalidArgument), ("10G", InvalidArgumentType)):
        with pytest.raises(error), options(cache_max_bytes=wrong):
            pass
