"""Writes SQLite files in the schema of nsys, so that its reader is tested without nsys."""

import sqlite3
from contextlib import closing
from pathlib import Path

PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75  #: ENUM_NSYS_EVENT_TYPE
HARDWARE = 0x0100 << 48  #: Upper bits of a globalTid: virtual machine and hardware.

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
    eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
    rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER,
    endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL,
    typeName TEXT NOT NULL, metricId INTEGER NOT NULL, metricName TEXT NOT NULL);
CREATE TABLE GPU_METRICS (rawTimestamp INTEGER, timestamp INTEGER, typeId INTEGER NOT NULL,
    metricId INTEGER NOT NULL, value INTEGER NOT NULL);
"""


class Export:
    """Collects what processes did; times are in nanoseconds."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._calls: list[tuple] = []
        self._ranges: list[tuple] = []
        self._kernels: list[tuple] = []
        self._copies: list[tuple] = []
        self._metrics: dict[tuple[int, str], int] = {}
        self._samples: list[tuple] = []

    def launch(self, at, *kernels, pid=7, tid=None, gpu=0, correlation=None):
        """Call the API at a time; it launches kernels (name, start, end): many are a graph."""
        correlation = self._call(at, pid, tid, correlation)
        for node, (name, start, end) in enumerate(kernels, 1):
            text = self._text(name)
            graph = node if len(kernels) > 1 else None
            self._kernels.append(
                (start, end, gpu, 1, 7, correlation, process(pid), text, text, graph)
            )

    def wait(self, at, name="cudaStreamSynchronize_v3020", *, pid=7, tid=None):
        """Call a function of the API that launches nothing."""
        self._call(at, pid, tid, None, name)

    def copy(self, at, start, end, size, *, kind=1, pid=7, tid=None, gpu=0, correlation=None):
        correlation = self._call(at, pid, tid, correlation)
        self._copies.append((start, end, gpu, 1, 7, correlation, process(pid), size, kind))

    def range(self, name, start, end, *, pid=7, tid=None, kind=PUSH_POP, domain=0, text=True):
        """Add a range; its name is a registered string unless ``text``."""
        where = process(pid) | (tid or pid)
        names = (name, None) if text else (None, self._text(name))
        row = (start, end, kind, None, None, None, names[0], where, None, names[1], domain)
        self._ranges.append(row)

    def sample(self, metric, at, value, *, gpu=0):
        """Add a sample of a GPU metric, such as "SMs Active [Throughput %]"."""
        number = self._metrics.setdefault((gpu, metric), len(self._metrics))
        self._samples.append((at, at, gpu, number, value))

    def write(self, path: Path) -> Path:
        metrics = [(gpu, 0, "set", number, name) for (gpu, name), number in self._metrics.items()]
        with closing(sqlite3.connect(path)) as db:
            db.executescript(SCHEMA)
            for table, rows in (
                ("StringIds", [(number, text) for text, number in self._texts.items()]),
                ("CUPTI_ACTIVITY_KIND_RUNTIME", self._calls),
                ("NVTX_EVENTS", self._ranges),
                ("CUPTI_ACTIVITY_KIND_KERNEL", self._kernels),
                ("CUPTI_ACTIVITY_KIND_MEMCPY", self._copies),
                ("TARGET_INFO_GPU_METRICS", metrics),
                ("GPU_METRICS", self._samples),
            ):
                if not rows:
                    db.execute(f"DROP TABLE {table}")  # nsys leaves out empty tables
                    continue
                marks = ", ".join("?" * len(rows[0]))
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
            db.commit()
        return path

    def _call(self, at, pid, tid, correlation, name="cudaLaunchKernel_v7000"):
        # as CUPTI does, count from 1 in every process
        count = 1 + sum(row[3] >> 24 == process(pid) >> 24 for row in self._calls)
        correlation = correlation or count
        where = process(pid) | (tid or pid)
        row = (at, at + 2_000, 0, where, correlation, self._text(name), 0, None)
        self._calls.append(row)
        return correlation

    def _text(self, text):
        return self._texts.setdefault(text, len(self._texts) + 1)


def process(pid):
    return HARDWARE | pid << 24
