"""Archives, written and taken apart.

target       a file that appears whole or not at all
writer       zip entries and the central directory
compression  methods and levels
sources      where an entry's bytes come from
pipeline     compression on several threads, writing in order
packing      pack_memmap, save
unpacking    unpack_memmap
verifying    verify_memmap
"""
