"""Saves that grow.

session    one save, locked, with its files open: rows are staged, written, committed, or taken back
batch      staged rows that have not been given to the writers
once       append_memmap, recover_memmap
appender   MemmapAppender
create     the save that an appender begins with
copying    rows of another save, without tensors in between
"""
