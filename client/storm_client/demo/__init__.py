"""The training process of `stormd demo`: a small GPT on real text, with offload or without.

A run is determined by its arguments alone, so that two runs which differ only in offload must
agree in every loss and every gradient, bit for bit.
"""
