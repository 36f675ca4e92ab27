"""The tier on disk: the file, the layout of a blob in it, and the threads that write and read it.

The tier decides nothing: the ledger (`ledger/spills.py`) decides what is written and read, and
when. Each job gets exactly one result. A fault of the disk ends the tier, not the daemon.
"""
