"""What the benchmark scripts share lives in the package, so that ``jitkern bench`` has it too."""

from jitkern.benches.common import COLD_BYTES, MAX_SETS, facts, sets_for, write_csv

__all__ = ["COLD_BYTES", "MAX_SETS", "facts", "sets_for", "write_csv"]
