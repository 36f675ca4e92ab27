"""`stormd bench codec`: the codec on what autograd saves in real training steps.

Only storages that an offloading client would send are counted: each once and whole, without
parameters.
"""
