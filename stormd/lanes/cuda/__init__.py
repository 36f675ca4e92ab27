"""The cuda lane, from `lane` down: a session, its two pipelines, and their work on the device.

lane      which device serves a session
session   a session's two directions, its beginning and end
pipeline  jobs that the device works on in order, several at once; knows no CUDA
stores, restores   the steps of a job in each direction
scratch, ring      the device memory that holds blobs during a job
client    the client's memory and counters; device: what all sessions of a GPU share

Importing the package loads no CUDA; importing `lane` does.
"""
