"""The demo: trainers share a daemon, and nothing about their training changes.

command, run, report, trainers   starts the processes, follows them, compares what they report
trainer, model, text             such a process: a small GPT on real text, with offload or without
past_vram...                     the same, one run of which does not fit into the GPU

A run is determined by its arguments alone, so two that differ only in offload must agree in every
loss and every gradient, bit for bit.
"""
