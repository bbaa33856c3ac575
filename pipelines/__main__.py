"""Entry point of `python -m pipelines`."""

import sys

from pipelines.app import main

sys.exit(main(sys.argv[1:]))
