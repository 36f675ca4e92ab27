"""The demo: trainers share a daemon, and nothing about their training changes.

command, run, report, trainers   starts the processes, follows them, compares what they report
trainer, model, text             a trainer: a small GPT on real text, with offload or without
past_vram...                     the same with a run that exceeds the GPU's memory without offload

A run's arguments alone determine its results. So two runs that differ only in offload must agree in
every loss and every gradient, bit for bit.
"""
