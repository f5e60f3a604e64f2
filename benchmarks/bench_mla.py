"""MLA decode beside its peers: the same as ``jitkern bench mla``, with a few options more (jitkern/benches/mla.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jitkern.benches.mla import main

if __name__ == "__main__":
    sys.exit(main())
