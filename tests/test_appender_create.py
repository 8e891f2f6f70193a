"""``MemmapAppender.create``: a save from an example, an existing one opened again, and never half of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import pytest
import tensordict
import torch
from appends import expect, flat, is_free, load, state
from compare import assert_same
from forked import in_process
from saves import Frame, Point, Thing, Typed, point
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdgpu import MemmapAppender, errors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*allow_pickle.*:FutureWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def test_create_makes_a_save_and_opens_it_again(tmp_path):
    path = tmp_path / "deep" / "er" / "save"
    with MemmapAppender.create(path, flat(7, 3)) as appender:
        assert (len(appender), appender.pending) == (0, 0)
        assert load(path).batch_size == (0,)
        appender.append(flat(0, 2))
    with MemmapAppender.create(str(path), flat(7, 1), durable=False) as appender:
        assert len(appender) == 2
        appender.append(flat(2, 1))
    expect(path, 3)
    assert os.listdir(tmp_path / "deep" / "er") == ["save"]
    flat(0, 3).memmap(tmp_path / "plain")
    assert {name: entry[1] for name, entry in state(path).items()} == {
        name: entry[1] for name, entry in state(tmp_path / "plain").items()
    }
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_create_takes_an_empty_directory_and_nothing_else(tmp_path):
    (tmp_path / "empty").mkdir()
    MemmapAppender.create(tmp_path / "empty", flat(0, 1)).close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    flat(0, 2).save(tmp_path / "archive.tdz")
    before = state(tmp_path)
    for name in ("full", "file", "archive.tdz"):
        with pytest.raises(errors.SaveExists):
            MemmapAppender.create(tmp_path / name, flat(0, 1))
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(errors.SaveExists):
        MemmapAppender.create(tmp_path / "dangling", flat(0, 1))
    (tmp_path / "dangling").unlink()
    assert state(tmp_path) == before


def test_create_refuses_another_structure(tmp_path):
    flat(0, 2).memmap(tmp_path / "save")
    before = state(tmp_path)
    for example in (flat(0, 1).exclude("a"), flat(0, 1).double(), point(), flat(0, 4).view(2, 2)):
        with pytest.raises(errors.InvalidArgument):
            MemmapAppender.create(tmp_path / "save", example)
    for example in (torch.zeros(3), None, {"a": torch.zeros(3)}):
        with pytest.raises(errors.InvalidArgumentType):
            MemmapAppender.create(tmp_path / "other", example)
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, i)}, [2]) for i in (1, 2)], 1)
    for example in (
        stack,
        lazy_stack([flat(0, 1)[0], flat(1, 1)[0]]),
        NonTensorStack("a", "b"),
        TensorDict({"s": NonTensorStack("a", "b")}, [2]),
    ):
        with pytest.raises(errors.InvalidArgument):
            MemmapAppender.create(tmp_path / "other", example)
    assert state(tmp_path) == before
    assert is_free(tmp_path / "save")


def _text() -> TensorDict:
    rows = TensorDict({"t": torch.rand(2)}, [2])
    rows.set_non_tensor("text", "words")
    rows.set_non_tensor("thing", Thing(3))
    return rows


EXAMPLES: dict[str, Callable[[], Any]] = {
    "flat": lambda: flat(0, 2),
    "two batch dimensions": lambda: TensorDict({"a": torch.rand(2, 3, 4)}, [2, 3], names=["time", "env"]),
    "tensorclass": lambda: Point(x=torch.rand(2), y=torch.rand(2, 3), batch_size=[2]),
    "nested tensorclass": lambda: Frame(
        image=torch.rand(2, 4), at=point()[:2], label="cat", extra={"k": [1, None]}, batch_size=[2]
    ),
    "values": _text,
    "gradients": lambda: TensorDict({"a": torch.rand(2, 3, requires_grad=True) * 2}, [2]),
    "expanded": lambda: TensorDict({"a": torch.rand(1, 3).expand(2, 3)}, [2]),
    "typed": lambda: Typed(a=torch.rand(2, 3), batch_size=[2]),
    "a view": lambda: flat(0, 4)._get_sub_tensordict(slice(1, 3)),
    "hollow": lambda: TensorDict({"a": torch.rand(2, 0), "n": TensorDict({}, [2])}, [2]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_create_from_examples_of_all_kinds(tmp_path, name):
    rows = EXAMPLES[name]()
    with MemmapAppender.create(tmp_path / "save", rows, allow_pickle=True) as appender:
        appender.append(rows)
        appender.append(rows)
    loaded = load(tmp_path / "save")
    assert loaded.batch_size == (4, *rows.batch_size[1:])
    rows.detach().memmap(tmp_path / "direct")
    tensordict.append_memmap(tmp_path / "direct", rows, allow_pickle=True)
    if name == "values":  # the pickle of a value is not the same bytes each time
        assert_same(loaded["t"], load(tmp_path / "direct")["t"])
        assert (loaded["text"], loaded["thing"]) == ("words", Thing(3))
    elif name not in ("typed", "a view"):
        assert_same(loaded, load(tmp_path / "direct"))


@pytest.mark.parametrize("name", ["flat", "tensorclass", "nested tensorclass", "values"])
def test_create_from_one_row_without_its_dimension(tmp_path, name):
    rows = EXAMPLES[name]()
    with MemmapAppender.create(tmp_path / "save", rows[0], allow_pickle=True) as appender:
        appender.append(rows)
    assert load(tmp_path / "save").batch_size == (2,)
    with pytest.raises(errors.InvalidArgument), MemmapAppender(tmp_path / "save", allow_pickle=True) as appender:
        appender.append(rows[0])


def test_create_from_an_example_without_bytes(tmp_path):
    """Only its structure is used; if it is refused all the same, then clearly, and nothing is there."""
    try:
        appender = MemmapAppender.create(tmp_path / "save", flat(0, 2).to("meta"))
    except (errors.InvalidArgument, errors.NotSupported):
        assert os.listdir(tmp_path) == []
        return
    with appender:
        appender.append(flat(0, 2))
    expect(tmp_path / "save", 2)


def test_several_processes_create_the_same_save(tmp_path):
    found = in_process(
        """
        import os, sys, time
        from pathlib import Path
        from appends import *
        path, begin = Path(sys.argv[1]) / "save", time.monotonic() + 0.5
        children = []
        for which in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    time.sleep(max(0, begin - time.monotonic()))
                    with tdgpu.MemmapAppender.create(path, flat(0, 1), timeout=30) as appender:
                        appender.append(flat(len(appender), 5))
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        print([os.waitpid(pid, 0)[1] for pid in children])
        """,
        tmp_path,
    )
    assert found == "[0, 0, 0, 0]\n"
    expect(tmp_path / "save", 20)
    assert os.listdir(tmp_path) == ["save"]


def test_a_create_that_is_killed_leaves_no_half_save(tmp_path):
    found = in_process(
        """
        import os, signal, sys
        from pathlib import Path
        from appends import *
        def stopping(nth):
            left = [nth]
            def trace(frame, event, argument):
                if event == "call":
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            return trace
        where, nth, seen = Path(sys.argv[1]), 1, set()
        tdgpu.MemmapAppender.create(where / "first", flat(0, 1)).close()  # imports what there is to import
        while True:
            path = where / str(nth)
            pid = os.fork()
            if pid == 0:
                sys.settrace(stopping(nth))
                appender = tdgpu.MemmapAppender.create(path / "save", flat(0, 1), durable=False)
                sys.settrace(None)
                os._exit(0)
            status = os.waitpid(pid, 0)[1]
            if (path / "save").exists():
                assert load(path / "save").batch_size == (0,), nth
            seen.add((path / "save").exists())
            with tdgpu.MemmapAppender.create(path / "save", flat(0, 1), durable=False) as appender:
                appender.append(flat(0, 1))
            expect(path / "save", 1)
            if status == 0:
                break
            nth += 199
        print(sorted(seen))
        """,
        tmp_path,
    )
    assert found == "[False, True]\n"
