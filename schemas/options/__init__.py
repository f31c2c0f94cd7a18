"""Options of requests: how each is named and explained wherever people meet it, stated once.

Schemas take their descriptions from here, the command line its options and their help, forms their fields, the pages of
the documentation their tables, and ``penstock.plan`` the parameters of its docstring.

May import: the standard library, and nothing else of Penstock.
Start reading at `option.py`.
"""
