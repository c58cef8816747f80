"""Files of embeddings: JSON lines, or Parquet with `pip install 'teneral[parquet]'`.

Rows are an id and a vector; they are written batch by batch, so that memory does not grow with the
file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from ....loader.errors import UsageError
from ....runtime.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

CONTENT_TYPES = {"parquet": "application/vnd.apache.parquet", "jsonl": "application/jsonl"}


class VectorWriter(Protocol):
    """Writes to a file that its caller opened and will close."""

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None: ...

    def finish(self) -> None: ...


def vector_writer(file: IO[bytes], kind: str, *, num_dimensions: int) -> VectorWriter:
    """For `kind` "jsonl" or "parquet". Raises `RequestError` for another, `UsageError` without pyarrow."""
    if kind == "jsonl":
        return JsonLinesVectors(file)
    if kind == "parquet":
        return ParquetVectors(file, num_dimensions)
    raise RequestError(f"vectors are written as jsonl or parquet, not as {kind[:20]!r}", param="output")


class JsonLinesVectors:
    """{"id": …, "embedding": […]} in each line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None:
        for name, vector in zip(ids, vectors.tolist(), strict=True):
            self._file.write(json.dumps({"id": name, "embedding": vector}).encode() + b"\n")

    def finish(self) -> None:
        """Do nothing: all lines are written."""


class ParquetVectors:
    """Columns `id` (string) and `embedding` (a list of float32 of fixed size), a row group a batch."""

    def __init__(self, file: IO[bytes], num_dimensions: int) -> None:
        try:
            import pyarrow
            import pyarrow.parquet  # 0.2 s and 170 MB installed: an extra
        except ImportError as error:
            raise UsageError(
                "Parquet needs pyarrow, which is not installed",
                key="parquet",
                hint="pip install 'teneral[parquet]', or write JSON lines.",
            ) from error
        self._arrow: Any = pyarrow
        vector = pyarrow.list_(pyarrow.float32(), num_dimensions)
        self._schema = pyarrow.schema([("id", pyarrow.string()), ("embedding", vector)])
        self._writer: Any = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, ids: Sequence[str], vectors: np.ndarray[Any, Any]) -> None:
        arrow = self._arrow
        values = arrow.array(vectors.reshape(-1), type=arrow.float32())
        embeddings = arrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        columns = [arrow.array(list(ids), type=arrow.string()), embeddings]
        self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._schema))

    def finish(self) -> None:
        """Write the footer, without which the file is invalid."""
        self._writer.close()
