"""The record of the verb ``probe``; memory and disk in MiB, times in seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinscope.lab.schemas.parts import Measured, Strict, Text


class Processor(Strict):
    """Processors: of the machine, those this process may run on, and what its control group grants."""

    model: Text
    logical: int
    physical: int | None
    affinity: int | None
    quota: Measured


class Memory(Strict):
    """Memory of the machine, what this process may still take, and the limit of its control group."""

    total_mib: float
    available_mib: float
    limit_mib: Measured


class Swap(Strict):
    """Swap of the machine."""

    total_mib: float
    used_mib: float


class Disk(Strict):
    """The file system where models are kept."""

    path: Text
    total_mib: float
    free_mib: float


class MatmulRow(Strict):
    """X @ W in fp32 with this many threads: the first call, and the ones after it.

    ``shape`` is (rows of X, inner, columns of W). ``error`` is the largest difference of one row from
    float64, relative to the sum of magnitudes; ``error_bound`` is what rounding allows.
    """

    kind: Literal["matmul"]
    key: Text
    shape: list[int]
    threads: int
    first_s: float
    next_s: list[float]
    gflop_per_s: float
    finite: bool
    error: float
    error_bound: float
    peak_rss_mib: Measured


class ReadingRow(Strict):
    """Rate of reading a file: from the disk, and once more when its pages are in memory."""

    kind: Literal["reading"]
    key: Text
    file_mib: float
    disk_mib_per_s: Measured
    cache_mib_per_s: Measured


class ConversionRow(Strict):
    """Rate of converting bf16 to fp32 in pieces into one reused buffer, one thread."""

    kind: Literal["conversion"]
    key: Text
    million_values_per_s: float
    piece_values: int


#: One row of a ``probe`` record.
ProbeRow = Annotated[MatmulRow | ReadingRow | ConversionRow, Field(discriminator="kind")]


class ProbeSummary(Strict):
    """Summary of the verb ``probe``.

    ``cores`` is how many processors this process can use; ``peak_rss_mib`` is that of the process that
    held NumPy alone and multiplied with one thread.
    """

    cores: int
    processor: Processor
    memory: Memory
    swap: Swap
    disk: Disk
    peak_rss_mib: Measured
    matmul: list[MatmulRow]
    reading: ReadingRow
    conversion: ConversionRow
    level: Literal["capacity"]
    seconds: float
