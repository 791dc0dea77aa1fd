"""The command line `python -m dpjax`.

1. `commands`: the parser and the options of all commands.
2. `plan`: the output of the commands `epsilon`, `noise` and `plan`.
3. `report`: the command `report`, with its HTML page and its text plot.
"""
