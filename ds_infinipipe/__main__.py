"""`python -m ds_infinipipe`, the same as the console script `infinipipe`."""

import sys

from ds_infinipipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
