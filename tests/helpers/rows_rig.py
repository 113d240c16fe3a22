"""Files of rows for tests of data: JSON Lines, a JSON array or parquet, as the file's name says."""

import json

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path, *rows):
    """Return the path; a row that is text becomes a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
