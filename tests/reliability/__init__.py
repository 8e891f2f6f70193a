"""Instruments that prove appends safe: on real files, in real processes, at every system call.

- `tracing` runs a function in a forked child under ptrace: kills it at a chosen system call, lets a chosen call fail,
  or logs what it does to files.
- `bed` makes saves whose every byte follows from the row's number, so that every byte can be checked.
- `sweep` kills appends and recoveries at every point and looks at what is left.
- `faults` lets each call fail with EIO, ENOSPC, EDQUOT.
- `order` looks at the order of the calls.
- `powerloss` looks at the states of a disk that a power failure may leave; `disk` makes them of a log.
- `diskfull`, `processes`: a disk that is really full; several processes at a time.

All of it forks, so it needs a process with a single thread, and without OpenMP threads: the tests start one
(`tests/test_reliability.py`), and so does ``python -m tests.reliability``, which runs as many as one likes.
"""
