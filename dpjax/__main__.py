"""The command-line entry point, `python -m dpjax`."""

import sys

from dpjax._cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
