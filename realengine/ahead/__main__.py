"""`python -m realengine.ahead`: see `realengine.ahead.launches`."""

import sys

from realengine.ahead.launches import main

if __name__ == "__main__":
    sys.exit(main())
