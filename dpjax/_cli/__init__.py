"""The outputs of the command line, whose options `dpjax.__main__` parses.

1. `plan`: the output of the commands `epsilon`, `noise` and `plan`.
2. `report`: the command `report`, with its HTML page and its text plot.
"""
