"""``python -m jitkern``."""

import sys

from jitkern.cli import main

sys.exit(main())
