"""The tier on disk: the file, how a blob lies in it, and the threads that write and read it.

It decides nothing. What is written and read, and when, is the ledger's (`ledger/spills.py`); each
job that was handed over is answered by one result. A fault of the disk ends the tier, not the
daemon.
"""
