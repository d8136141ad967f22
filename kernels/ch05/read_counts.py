"""What this process has read from files, cached or not, as Linux counts it."""

from pathlib import Path

COUNTS = Path("/proc/self/io")


def reads_of(function, *arguments):
    """Call a function; return the number of system calls that read, and the bytes they returned.

    Both include the two reads of the counts themselves, of some 100 bytes.
    """
    before = _counts()
    function(*arguments)
    after = _counts()
    return after["syscr"] - before["syscr"], after["rchar"] - before["rchar"]


def _counts():
    lines = (line.split(": ") for line in COUNTS.read_text().splitlines())
    return {name: int(value) for name, value in lines}
