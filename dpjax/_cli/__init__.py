"""`python -m dpjax`: the parser in `commands`, and a file for each longer command."""
