"""``python -m elixir.cli`` is the same as ``elixir``."""

import sys

from elixir.cli import main

sys.exit(main())
