"""How a save changes: old rows or new rows at every level, wherever an append or a recovery is killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from compare import assert_same
from saves import Point
from tensordict import LazyStackedTensorDict, TensorDict

import tdgpu
from tdgpu.errors import AppendError, FormatError, LoadError, SaveNotFound
from tdgpu.layout import commit, objects, reader
from tdgpu.layout.commit import TEMPORARY, advance, recover
from tdgpu.layout.growth import Growing, growing, match

OLD, NEW = 5, 9


def nested(first: int, count: int) -> Any:
    """Rows of three levels and a tensorclass; their contents say which rows they are."""
    at = torch.arange(first, first + count)
    p = Point(x=at.float(), y=at.double().view(-1, 1).expand(-1, 3), batch_size=[count])
    td = TensorDict(
        {"a": at, "n": {"b": (at * 2).to(torch.int16), "m": {"c": at.view(-1, 1) * torch.ones(2)}}}, [count]
    )
    td["p"] = p
    td.set_non_tensor("s", "text")
    return td


def tensorclass(first: int, count: int) -> Any:
    at = torch.arange(first, first + count)
    inner: Any = Point(x=at.float(), y=at.double(), batch_size=[count])
    return Point(x=inner, y=TensorDict({"b": at}, [count]), batch_size=[count])


KINDS = {"nested": nested, "tensorclass": tensorclass}


def read(path: Path) -> Growing:
    save = reader.read(path)
    objects.resolve(save, None)
    return growing(save)


def write_rows(grows: Growing, rows: Any) -> int:
    """Puts rows behind the committed ones. How many there are then."""
    count, tensors = match(grows, rows)
    for leaf, tensor in zip(grows.leaves, tensors, strict=True):
        descriptor = os.open(leaf.file, os.O_WRONLY | os.O_CREAT, 0o666)
        os.pwrite(descriptor, tensor.contiguous().numpy().tobytes(), grows.rows * leaf.row_nbytes)
        os.close(descriptor)
    return grows.rows + count


def append(path: Path, rows: Any, *, durable: bool = False) -> None:
    grows = read(path)
    advance(grows, write_rows(grows, rows), durable=durable)


def rows_in(path: Path, make: Callable[[int, int], Any], load: Callable[..., Any] = tdgpu.load_memmap) -> int:
    """The rows of a save, once every level and every byte was found to be theirs."""
    loaded = load(path)
    count: int = loaded.batch_size[0]
    expected = make(0, count)
    assert set(loaded.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, False):
        assert loaded.get(key).shape[0] == count, key
    assert_same(loaded.to_tensordict().to("cpu"), expected.to_tensordict().to("cpu"))
    return count


def temporaries(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob(TEMPORARY))


def state_of(path: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(path)): (file.read_bytes(), stat.S_IMODE(file.lstat().st_mode))
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def documented_recovery(top: Path) -> None:
    """What tensordict's documentation of append_memmap says to do, by hand. (``top``: of a tensorclass, its inner.)"""
    files = list(top.rglob(TEMPORARY))
    for file in files:
        if top / TEMPORARY in files:
            file.unlink()
        else:
            file.rename(file.with_name("meta.json"))


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(tmp_path: Path, kind: str) -> Path:
    """A save of OLD rows, behind which those up to NEW have been written."""
    path = tmp_path / "base"
    KINDS[kind](0, OLD).memmap(path)
    assert write_rows(read(path), KINDS[kind](OLD, NEW - OLD)) == NEW
    return path


def top_of(path: Path, kind: str) -> Path:
    return path / "_tensordict" if kind == "tensorclass" else path


# --- a commit that goes well ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_rows_are_committed(base: Path, kind: str, durable: bool) -> None:
    make = KINDS[kind]
    assert rows_in(base, make) == OLD
    grows = read(base)
    advance(grows, NEW, durable=durable)
    assert grows.rows == NEW
    assert rows_in(base, make) == rows_in(base, make, tensordict.load_memmap) == NEW
    advance(grows, write_rows(grows, make(NEW, 100)), durable=durable)
    assert rows_in(base, make) == NEW + 100
    assert temporaries(base) == []
    assert recover(str(base)).state == "clean"


def test_all_bytes_are_those_of_tensordict(tmp_path: Path, kind: str) -> None:
    make = KINDS[kind]
    for name in ("ours", "theirs"):
        make(0, OLD).memmap(tmp_path / name)
    append(tmp_path / "ours", make(OLD, 4))
    tensordict.append_memmap(tmp_path / "theirs", make(OLD, 4))
    assert state_of(tmp_path / "ours") == state_of(tmp_path / "theirs")


def test_the_first_rows_of_an_empty_save(tmp_path: Path) -> None:
    nested(0, 0).memmap(tmp_path)
    append(tmp_path, nested(0, 3))
    assert rows_in(tmp_path, nested) == 3


def test_modes_and_owners_stay(base: Path, kind: str) -> None:
    metas = [Path(level.directory, "meta.json") for level in read(base).levels]
    modes = [0o600, 0o644, 0o664, 0o440]
    for meta, mode in zip(metas, modes, strict=False):
        meta.chmod(mode)
        if os.geteuid() == 0:
            os.chown(meta, 1234, 4321)
    before = [(meta.stat().st_mode, meta.stat().st_uid, meta.stat().st_gid) for meta in metas]
    mask = os.umask(0o077)
    try:
        advance(read(base), NEW, durable=False)
    finally:
        os.umask(mask)
    assert [(meta.stat().st_mode, meta.stat().st_uid, meta.stat().st_gid) for meta in metas] == before
    assert rows_in(base, KINDS[kind]) == NEW


def calls_of(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls by which ``work`` changes or syncs files, in order: what it is, and on which path."""
    calls: list[tuple[str, str]] = []
    paths: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink")}

    def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        descriptor: int = real["open"](path, flags, *rest, **more)
        paths[descriptor] = os.fspath(path)
        if flags & os.O_CREAT:
            calls.append(("create", os.fspath(path)))
        return descriptor

    def on_descriptor(name: str) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            calls.append((name, paths[descriptor]))
            return real[name](descriptor, *rest)

        return call

    def on_path(name: str) -> Callable[..., Any]:
        def call(*some: Any) -> Any:
            calls.append((name, os.fspath(some[-1])))
            return real[name](*some)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        for name in ("write", "fsync"):
            patch.setattr(os, name, on_descriptor(name))
        for name in ("replace", "unlink"):
            patch.setattr(os, name, on_path(name))
        work()
    return calls


def test_the_order_of_a_durable_commit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grows = read(base)
    directories = [level.directory for level in grows.levels]
    top, *others = directories
    expected = []
    for directory in directories:
        temporary = os.path.join(directory, TEMPORARY)
        expected += [("create", temporary), ("write", temporary), ("fsync", temporary), ("fsync", directory)]
    expected += [("replace", os.path.join(top, "meta.json")), ("fsync", top)]
    expected += [("replace", os.path.join(directory, "meta.json")) for directory in others]
    expected += [("fsync", directory) for directory in others]
    assert calls_of(lambda: advance(grows, NEW, durable=True), monkeypatch) == expected


def test_without_durability_nothing_is_synced(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grows = read(base)
    calls = calls_of(lambda: advance(grows, NEW, durable=False), monkeypatch)
    assert len(calls) == 3 * len(grows.levels)
    assert "fsync" not in {name for name, _ in calls}


# --- a commit that fails ----------------------------------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "fchmod", "replace", "lstat")


def failing(patch: pytest.MonkeyPatch, nth: int, code: int = errno.EIO) -> list[str]:
    """Lets the ``nth`` call from now on fail. The list holds its name once it has."""
    seen = 0
    failed: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*some: Any, **more: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == nth:
                failed.append(name)
                raise OSError(code, os.strerror(code))
            return real(*some, **more)

        return call

    for name in CALLS:
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    return failed


def test_a_failure_leaves_the_old_rows_or_the_new(
    base: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = KINDS[kind]
    outcomes = set()
    for nth in range(1, 1000):
        path = tmp_path / "copy"
        shutil.copytree(base, path)
        grows = read(path)
        with monkeypatch.context() as patch:
            failed = failing(patch, nth)
            error: BaseException | None = None
            try:
                advance(grows, NEW, durable=True)
            except AppendError as caught:
                error = caught
        assert (error is not None) == bool(failed)
        if error is None:
            assert rows_in(path, make) == NEW
            break
        if grows.rows == OLD:
            outcomes.add("taken back")
            assert "are committed" not in str(error)
            assert state_of(path) == state_of(base), (nth, failed)
        else:
            outcomes.add("committed")
            assert "All 9 rows are committed" in str(error)
        if error is not None:
            assert str(path) in (error.file or ""), (nth, failed)  # type: ignore[attr-defined]
            assert rows_in(path, make) == grows.rows
        # The appender goes on by itself, whatever was left.
        advance(grows, write_rows(grows, make(grows.rows, 3)), durable=False)
        assert rows_in(path, make) == rows_in(path, make, tensordict.load_memmap) == grows.rows
        assert temporaries(path) == []
        shutil.rmtree(path)
    assert outcomes == {"taken back", "committed"}


def test_what_cannot_be_taken_back_is_said_and_done_later(
    base: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grows = read(base)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        patch.setattr(os, "unlink", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        with pytest.raises(AppendError, match=f"{TEMPORARY} could not be removed \\(read-only\\)") as caught:
            advance(grows, NEW, durable=False)
        assert caught.value.errno == errno.ENOSPC
        assert len(temporaries(base)) == len(grows.levels)  # the top one above all: nothing has been committed
        with pytest.raises(AppendError, match="still cannot be put in order"):
            advance(grows, NEW, durable=False)
    assert rows_in(base, KINDS[kind]) == OLD
    advance(grows, NEW, durable=False)
    assert rows_in(base, KINDS[kind]) == NEW


def test_an_interrupt_takes_everything_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of(base)
    grows = read(base)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            advance(grows, NEW, durable=True)
    assert state_of(base) == before


def test_the_top_level_is_taken_back_last(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its temporary file is gone means that the others count."""
    grows = read(base)
    expected = []
    for level in reversed(grows.levels):
        expected += [("unlink", os.path.join(level.directory, TEMPORARY)), ("fsync", level.directory)]

    def work() -> None:
        with pytest.raises(AppendError):
            advance(grows, NEW, durable=True)

    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    calls = calls_of(work, monkeypatch)
    assert calls[-len(expected) :] == expected
    assert calls[-len(expected) - 1][0] == "replace"


def test_links_at_the_temporary_name_are_not_followed(base: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for level in read(base).levels:
        link = Path(level.directory, TEMPORARY)
        link.symlink_to(victim)
        with pytest.raises(AppendError, match="File exists") as caught:
            advance(read(base), NEW, durable=False)
        assert caught.value.file == str(link)
        link.unlink()
    assert victim.read_text() == "precious"
    assert temporaries(base) == []


def test_a_link_that_took_the_place_of_metadata_is_refused(base: Path, tmp_path: Path) -> None:
    grows = read(base)
    meta = Path(grows.levels[-1].directory, "meta.json")
    meta.rename(tmp_path / "elsewhere")
    meta.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AppendError, match="symbolic link"):
        advance(grows, NEW, durable=False)
    assert temporaries(base) == []


def test_a_writer_that_asks_for_no_lock_is_noticed(base: Path, kind: str) -> None:
    make = KINDS[kind]
    grows = read(base)
    tensordict.append_memmap(base, make(OLD, 2))
    with pytest.raises(AppendError, match="it had 5 rows, and has 7 now"):
        advance(grows, NEW, durable=False)
    assert rows_in(base, make) == 7
    grows = read(base)
    advance(grows, write_rows(grows, make(7, 1)), durable=False)
    tensordict.append_memmap(base, make(8, 2))
    with pytest.raises(AppendError, match="it had 8 rows, and has 10 now"):
        advance(grows, 9, durable=False)
    assert rows_in(base, make) == 10
    shutil.rmtree(base)
    with pytest.raises(AppendError, match="can no longer be read"):
        advance(grows, 9, durable=False)


def test_directories_that_cannot_be_written_are_named(base: Path) -> None:
    grows = read(base)
    inner = Path(grows.levels[-1].directory)
    for parent in inner.parents[:-2]:
        if os.stat(parent).st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    for level in grows.levels:
        os.chmod(level.directory, 0o777)

    def check() -> None:
        if os.geteuid() == 0:  # who may write everywhere
            os.setegid(65534)
            os.seteuid(65534)
        commit.check_writable(grows)

    assert in_child(check) == "done"
    inner.chmod(0o555)
    assert in_child(check) == f"PermissionError: {inner}"
    inner.chmod(0o777)


# --- killed at every point --------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> str:
    """What became of ``work`` in a child: "done", "killed", or the error."""
    reading, writing = os.pipe()
    leave = os._exit
    pid = os.fork()
    if pid == 0:
        try:
            work()
            message = "done"
        except OSError as error:
            message = f"{type(error).__name__}: {error.filename}"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        leave(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(pid, 0)
    return message or "killed"


def killed_at(work: Callable[[], None], nth: int) -> str:
    """Runs ``work`` in a child that dies right before its ``nth`` call that changes or syncs something."""

    def run() -> None:
        seen = 0

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*some: Any, **more: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == nth:
                    os._exit(9)
                return real(*some, **more)

            return call

        original = {name: getattr(os, name) for name in (*CALLS, "unlink", "fchown", "close")}
        for name, real in original.items():
            setattr(os, name, wrap(real))
        try:
            work()
        finally:
            for name, real in original.items():
                setattr(os, name, real)

    return in_child(run)


def copies(base: Path, work: Callable[[Path], None]) -> Iterator[Path]:
    """A copy of a save for each point at which ``work`` can be killed, which it was, and one on which it has ended."""
    for nth in range(1, 1000):
        path = base.with_name("killed")
        shutil.copytree(base, path)
        outcome = killed_at(lambda path=path: work(path), nth)  # type: ignore[misc]
        assert outcome in ("killed", "done"), outcome
        yield path
        shutil.rmtree(path)
        if outcome == "done":
            return


def check_survived(path: Path, kind: str) -> int:
    """Whoever reads it, and whoever puts it in order: the same rows, whole. How many."""
    make = KINDS[kind]
    rows = rows_in(path, make)
    assert rows in (OLD, NEW)
    by_hand = path.with_name("by hand")
    shutil.copytree(path, by_hand)
    documented_recovery(top_of(by_hand, kind))
    assert rows_in(by_hand, make, tensordict.load_memmap) == rows
    shutil.rmtree(by_hand)
    report = recover(str(path))
    assert report.rows == rows
    assert temporaries(path) == []
    assert rows_in(path, make, tensordict.load_memmap) == rows_in(path, make) == rows
    assert recover(str(path)).state == "clean"
    append(path, make(rows, 2))
    assert rows_in(path, make, tensordict.load_memmap) == rows + 2
    return rows


def test_an_append_that_is_killed_anywhere(base: Path, kind: str) -> None:
    def work(path: Path) -> None:
        advance(read(path), NEW, durable=True)

    found = [check_survived(path, kind) for path in copies(base, work)]
    assert found == sorted(found)  # old rows up to the commit, new rows from then on
    assert set(found) == {OLD, NEW}
    assert len(found) > 12 * len(read(base).levels)


def half_done(base: Path, kind: str, *, committed: bool, renamed: int = 0) -> None:
    """Leaves what an append leaves that is killed before or after its commit, when it has renamed some others."""
    for growing_level in read(base).levels:
        Path(growing_level.directory, TEMPORARY).write_bytes(growing_level.metadata(NEW))
    if committed:
        for level in read_levels(base, kind)[: renamed + 1]:
            os.replace(level / TEMPORARY, level / "meta.json")


def read_levels(base: Path, kind: str) -> list[Path]:
    if kind == "nested":
        return [base, base / "n", base / "n/m", base / "p/_tensordict"]
    return [base / "_tensordict", base / "_tensordict/x/_tensordict", base / "_tensordict/y"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_recovery_that_is_killed_anywhere(base: Path, kind: str, committed: bool) -> None:
    half_done(base, kind, committed=committed)

    def work(path: Path) -> None:
        recover(str(path))

    rows = NEW if committed else OLD
    found = [check_survived(path, kind) for path in copies(base, work)]
    assert set(found) == {rows}
    assert len(found) > 6


def test_tensordict_killed_anywhere(base: Path, kind: str) -> None:
    """What tensordict's own append leaves is put in order, too."""
    make = KINDS[kind]

    def work(path: Path) -> None:
        tensordict.append_memmap(path, make(OLD, NEW - OLD))

    found = [check_survived(path, kind) for path in copies(base, work)]
    assert set(found) == {OLD, NEW}


# --- recovering -------------------------------------------------------------------------------------------------------


def test_reports(base: Path, kind: str) -> None:
    levels = read_levels(base, kind)
    assert [str(level) for level in levels] == [level.directory for level in read(base).levels]
    row = sum(leaf.row_nbytes for leaf in read(base).leaves)
    surplus = row * (NEW - OLD)
    clean = recover(str(base))
    assert (clean.path, clean.state, clean.rows, clean.completed, clean.removed) == (base, "clean", OLD, (), ())
    assert clean.surplus == surplus
    half_done(base, kind, committed=False)
    undone = recover(str(base))
    assert (undone.state, undone.rows, undone.completed, undone.surplus) == ("undone", OLD, (), surplus)
    assert undone.removed == tuple(str(level / TEMPORARY) for level in reversed(levels))
    half_done(base, kind, committed=True, renamed=1)
    completed = recover(str(base))
    assert (completed.state, completed.rows, completed.removed, completed.surplus) == ("completed", NEW, (), 0)
    assert completed.completed == tuple(str(level / "meta.json") for level in levels[2:])
    assert rows_in(base, KINDS[kind]) == NEW


def test_leftovers_of_a_rollback_are_removed(base: Path, kind: str) -> None:
    """tensordict deletes the top level's first when it rolls back; killed then, it has not committed."""
    half_done(base, kind, committed=False)
    (top_of(base, kind) / TEMPORARY).unlink()
    before = rows_in(base, KINDS[kind])
    report = recover(str(base))
    assert (report.state, report.rows, report.completed, before) == ("undone", OLD, (), OLD)
    assert len(report.removed) == len(read(base).levels) - 1


@pytest.mark.parametrize("damage", ["missing", "truncated", "of other rows", "of another level", "a link"])
def test_a_level_that_cannot_be_completed(base: Path, kind: str, damage: str) -> None:
    half_done(base, kind, committed=True)
    level = read_levels(base, kind)[-1]
    temporary = level / TEMPORARY
    contents = temporary.read_bytes()
    if damage == "truncated":
        temporary.write_bytes(contents[:-1])
    elif damage == "of other rows":
        temporary.write_bytes(contents.replace(b"[9", b"[8"))
    elif damage == "of another level":
        temporary.write_bytes(json.dumps({**json.loads(contents), "other": 1}).encode())
    else:
        temporary.unlink()
    if damage == "a link":
        (base / "copy").write_bytes(contents)
        temporary.symlink_to(base / "copy")
    before = state_of(base)
    with pytest.raises(FormatError, match="has 5 rows, the one at the top has 9") as caught:
        recover(str(base))
    assert caught.value.file == str(level / "meta.json")
    assert caught.value.save == str(base)
    assert state_of(base) == before


def test_a_level_that_is_ahead(base: Path, kind: str) -> None:
    half_done(base, kind, committed=True)
    level = read_levels(base, kind)
    # The commit is undone by hand, one level was renamed: no append leaves that.
    os.replace(level[1] / TEMPORARY, level[1] / "meta.json")
    meta = json.loads((level[0] / "meta.json").read_text())
    os.rename(level[0] / "meta.json", level[0] / TEMPORARY)
    meta["shape"][0] = OLD
    (level[0] / "meta.json").write_text(json.dumps(meta))
    before = state_of(base)
    with pytest.raises(FormatError, match="has 9 rows, the one at the top has 5"):
        recover(str(base))
    assert state_of(base) == before


def test_parts_that_grow_by_themselves_are_left_to_themselves(tmp_path: Path) -> None:
    members = [TensorDict({"a": torch.zeros(2, 3)}, [2]) for _ in range(2)]
    LazyStackedTensorDict(*members).memmap(tmp_path / "stack")
    TensorDict({"n": TensorDict({"a": torch.zeros(2, 3)}, [2])}).memmap(tmp_path / "parent")
    for top, part in ((tmp_path / "stack", "1"), (tmp_path / "parent", "n")):
        assert recover(str(top)) == commit.RecoveryReport(top, "clean", 0, (), (), 0)
        append(top / part, members[0])
        (top / part / TEMPORARY).write_text("{}")
        with pytest.raises(FormatError, match="recover it by itself") as caught:
            recover(str(top))
        assert caught.value.file == str(top / part / TEMPORARY)
        assert recover(str(top / part)).state == "undone"
        assert tdgpu.load_memmap(top) is not None


def test_no_class_needs_to_be_known(base: Path, kind: str) -> None:
    half_done(base, kind, committed=True)
    metas = [file for file in base.rglob("meta.json") if b"saves.Point" in file.read_bytes()]
    assert metas
    for file in metas:
        file.write_bytes(file.read_bytes().replace(b"saves.Point", b"gone.Point"))
    assert recover(str(base)).state == "completed"


def test_no_save(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SaveNotFound) as caught:
            recover(str(path))
        assert caught.value.save == str(path)


# --- archives ---------------------------------------------------------------------------------------------------------


def test_a_pending_append_is_not_packed(base: Path, kind: str, tmp_path: Path) -> None:
    half_done(base, kind, committed=True)
    with pytest.raises(FormatError, match="recover_memmap") as caught:
        tdgpu.pack_memmap(base, tmp_path / "save.tdz")
    assert (caught.value.file or "").endswith(TEMPORARY)
    assert not (tmp_path / "save.tdz").exists()
    (note,) = tdgpu.verify_memmap(base).notes
    assert "recover_memmap" in note
    recover(str(base))
    assert tdgpu.verify_memmap(base).notes == ()
    assert rows_in(tdgpu.pack_memmap(base, tmp_path / "save.tdz"), KINDS[kind]) == NEW


def test_rows_appended_while_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space for rows can have been reserved before, so that no size tells."""
    TensorDict({"n": TensorDict({"e": torch.zeros(5, 0)}, [5])}, [5]).memmap(tmp_path / "save")
    from tdgpu.archives.sources import FileSource

    real, grows = FileSource.pieces, read(tmp_path / "save")

    def pieces(source: FileSource) -> Any:
        yield from real(source)
        advance(grows, grows.rows + 1, durable=False)

    monkeypatch.setattr(FileSource, "pieces", pieces)
    with pytest.raises(LoadError, match="while it was packed"):
        tdgpu.pack_memmap(tmp_path / "save", tmp_path / "save.tdz", num_threads=0)
    assert not (tmp_path / "save.tdz").exists()
