"""The signals of all cases in one table, kept beside the archive under the hash of what it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from casewise.archive import layout
from casewise.archive.layout import Entry
from casewise.core.durable import replacing
from casewise.core.errors import DamagedArchive
from casewise.core.records import Signals, State

KEYS = ["case", "step", "shrink"]


def signal_table(path: Path, entries: Mapping[str, Entry], digest: str) -> pd.DataFrame:
    """One row for each (case, step, shrink); read once from the cases, later from the cache."""
    return cached_table(path, f"signals-{digest}", lambda: _collected(path, entries))


def cached_table(path: Path, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A derived table that is made once; a folder that cannot be written costs speed, not the result."""
    file = path / layout.CACHE / f"{name}.parquet"
    if file.exists():
        try:
            return pd.read_parquet(file)
        except (OSError, ValueError):
            file.unlink(missing_ok=True)
    table = make()
    try:
        with replacing(file) as temporary:
            table.to_parquet(temporary)
    except OSError:
        pass
    return table


def ladders(table: pd.DataFrame) -> dict[str, dict[State, Signals]]:
    """Signals by case and state; a signal that is not computable is None."""
    names = [name for name in table.columns if name not in KEYS]
    values = table[names].astype(object).where(table[names].notna(), None).to_numpy().tolist()
    found: dict[str, dict[State, Signals]] = {}
    keys = zip(table["case"].tolist(), table["step"].tolist(), table["shrink"].tolist(), strict=True)
    for (case, step, shrink), row in zip(keys, values, strict=True):
        found.setdefault(case, {})[State(step, shrink)] = dict(zip(names, row, strict=True))
    return found


def _collected(path: Path, entries: Mapping[str, Entry]) -> pd.DataFrame:
    if not entries:
        return pd.DataFrame(columns=KEYS)
    tables = [case_table(path / layout.CASES / entry.place / layout.SIGNALS, entry.id) for entry in entries.values()]
    return pa.concat_tables(tables, promote_options="default").to_pandas()


def case_table(file: Path, case_id: str) -> pa.Table:
    """The signals of one case, as they lie in its folder."""
    try:
        table = pq.ParquetFile(file).read()
    except FileNotFoundError:
        raise DamagedArchive(f"{file} is missing; restore it or record case {case_id} again") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedArchive(f"{file} is damaged ({error}); restore it or record case {case_id} again") from error
    return table.add_column(0, "case", pa.array([case_id] * len(table), pa.string()))
