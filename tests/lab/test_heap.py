"""Freed blocks leave the resident memory of a process, which they do not by themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from twinscope.lab.budget import rss_mib
from twinscope.lab.heap import give_back_freed, map_large_blocks

if "map" in sys.argv:
    print("taken", map_large_blocks())
bytearray(16 << 20)  # freeing it lets the allocator keep blocks up to this size on its heap
before = rss_mib()
large, small = [], []
for _ in range(20):
    large.append(bytearray(b"x") * (3 << 20))
    small.append(bytearray(b"x") * (64 << 10))  # what stays between them
large.clear()
print("kept", rss_mib() - before)
give_back_freed()
print("then", rss_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
@pytest.mark.parametrize("mode", ["map", "plain"])
def test_freed_blocks_are_given_back(mode):
    command = [sys.executable, "-c", PROGRAM, mode]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = dict(zip(out[::2], out[1::2], strict=True))
    assert ("True" if mode == "map" else None) == found.get("taken")
    if mode == "map":
        assert float(found["kept"]) < 6
    else:
        assert float(found["kept"]) > 40
    assert float(found["then"]) < 6
