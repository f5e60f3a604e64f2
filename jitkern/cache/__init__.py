"""The disk cache: entries that are published as one unit and checked before every use.

An entry is a folder ``<root>/v1/<target>/<variant>-<digest>`` with the text, the binary and ``meta.json``. It is
written under ``<root>/v1/tmp``, flushed, and renamed into place, so that a reader sees all of it or nothing; whoever
loses a race goes on with the bytes it holds. Correctness never rests on a lock. See ``docs/reliability.md`` for what
is tested.
"""

from jitkern.cache.files import BadFileError
from jitkern.cache.key import SCHEMA, Entry, Key
from jitkern.cache.roots import default_roots, open_store, read_only_stores
from jitkern.cache.store import Store

__all__ = ["SCHEMA", "BadFileError", "Entry", "Key", "Store", "default_roots", "open_store", "read_only_stores"]
