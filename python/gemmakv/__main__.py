"""`python -m gemmakv`: the command line."""

import sys

from gemmakv.cli import main

sys.exit(main())
