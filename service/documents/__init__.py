"""Documents that clients send: parsed in linear time, with the names of shipped ones resolved.

May import: what `service` may.
Start reading at `parsing.py`.
"""
