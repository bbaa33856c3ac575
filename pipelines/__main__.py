"""Entry point of `python -m pipelines`."""

import gc
import sys

from pipelines.app import main

# Imports make half a million objects that stay: look through them for garbage less often.
gc.set_threshold(100_000, 50, 50)
sys.exit(main(sys.argv[1:]))
