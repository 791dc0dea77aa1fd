"""`python -m dpjax`."""

import sys

from dpjax._command_line import main

if __name__ == "__main__":
    sys.exit(main())
