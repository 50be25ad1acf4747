"""`python -m octavo` is `octavo`."""

import sys

from octavo.cli.main import main

sys.exit(main())
