"""`python -m storm_client.native` builds the compiled client, or says why it cannot."""

import sys

from storm_client.native.build import main

if __name__ == "__main__":
    sys.exit(main())
